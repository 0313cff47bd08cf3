"""The whole server, from the first socket to the last stream: open the ports, load, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from prism_server.errors import EngineFault, PrismError
from prism_server.http.interpreter import set_loaded_objects_aside
from prism_server.http.sockets import bind, url_of
from prism_server.http.stop import LAST_WORDS_S, POLL_S, StopSignal, until_empty, wait_for
from prism_server.serving.app import admin_app, api_app
from prism_server.serving.http_errors import NotReady
from prism_server.serving.listeners import listening
from prism_server.serving.services import Services
from prism_server.serving.watchdog import Watchdog, step_limit_s
from prism_server.settings import ServerSettings

if TYPE_CHECKING:
    from prism_server.engine.engine import Engine, Progress

FAULT_EXIT_CODE = 1


async def serve(settings: ServerSettings) -> int:
    """Runs until told to stop; the process's exit code. Raises StartupError if it cannot start as configured."""
    services = Services.from_settings(settings)
    stop = StopSignal()

    def drain() -> None:
        services.lifecycle.leave()
        stop.asked.set()

    http = settings.http
    api = bind(http.host, http.port, "http.port")
    admin = bind(http.admin_host, http.admin_port, "http.admin_port")
    try:
        async with listening([(api, api_app(services)), (admin, admin_app(services, drain))]):
            print(f"prism-serve: api on {url_of(api)}, admin on {url_of(admin)}", flush=True)
            fault = await _load_and_serve(services, stop)
    finally:
        has_ended = await asyncio.to_thread(services.close)
    fault = fault or _fault_at_the_end(services, has_ended)
    code = 0
    if fault is not None:
        _say_fault(fault)  # as the last line, said before or not: Kubernetes keeps the end of what a container has said
        code = FAULT_EXIT_CODE
    if not has_ended:
        _leave_at_once(code)
    return code


def _fault_at_the_end(services: Services, has_ended: bool) -> EngineFault | None:
    """Of an engine in whose last step the drain was over: the step has failed since, or does not end."""
    if not has_ended:
        return EngineFault("the engine stands still: told to stop, it did not end its step")
    return services.fault


def _leave_at_once(code: int) -> NoReturn:
    """An orderly end of the interpreter would wait for the thread that is stuck in the device."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _load_and_serve(services: Services, stop: StopSignal) -> EngineFault | None:
    """What the engine died of; None where all went in order."""
    engine = await _first_of(_load(services), stop)
    if engine is None:
        return None
    services.attach(engine)
    set_loaded_objects_aside()
    info = engine.info
    print(
        f"prism-serve: ready after {services.lifecycle.ready_after_s:.1f} s: {info.model_name} on {info.device}, "
        f"{info.total_pages} pages of {info.page_tokens} tokens ({info.kv_dtype})",
        flush=True,
    )
    fault = await _serve_and_drain(services, engine, stop)
    if fault is not None:
        await _end_faulted(services, fault)
    return fault


async def _serve_and_drain(services: Services, engine: Engine, stop: StopSignal) -> EngineFault | None:
    """Until the drain is over, or at once when the engine dies, before it is told to stop or after."""
    limit_s = step_limit_s(services.settings.engine.step_timeout_s, engine.info.device)
    watching = asyncio.create_task(_until_fault(engine, Watchdog(limit_s)))
    draining = asyncio.create_task(_drain_when_asked(services, stop))
    done, left = await asyncio.wait((watching, draining), return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    for task in done:
        task.result()  # what it raises is not lost
    return watching.result() if watching in done else engine.fault  # it may have died since the last look


async def _until_fault(engine: Engine, watchdog: Watchdog) -> EngineFault:
    """What the engine died of, or that it stands still."""
    while engine.fault is None:
        if watchdog.bites(engine.turn_began_s, time.monotonic()):
            return EngineFault("the engine stands still: a step has taken longer than engine.step_timeout_s allows")
        await asyncio.sleep(POLL_S)
    return engine.fault


async def _first_of(loading: asyncio.Future[Engine], stop: StopSignal) -> Engine | None:
    """The loaded engine, or None if the stop came first."""
    asked = asyncio.ensure_future(stop.asked.wait())
    either: tuple[asyncio.Future[Any], ...] = (loading, asked)
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    return loading.result() if loading.done() else None


def _load(services: Services) -> asyncio.Future[Engine]:
    """Builds the engine in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Engine] = loop.create_future()

    def on_progress(progress: Progress) -> None:
        loop.call_soon_threadsafe(services.lifecycle.progress, progress.stage, progress.done, progress.total)

    def load() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: stopped before the model was there
            try:
                from prism_server.engine.engine import Engine  # imports torch: seconds that the ports do not wait

                engine = Engine.build(services.settings, on_progress)
            except BaseException as error:
                loop.call_soon_threadsafe(loaded.set_exception, error)
            else:
                loop.call_soon_threadsafe(loaded.set_result, engine)

    threading.Thread(target=load, name="prism-load", daemon=True).start()
    return loaded


async def _end_faulted(services: Services, fault: EngineFault) -> None:
    """Everybody inside is told; then the process ends, so that something healthier can start."""
    _say_fault(fault)
    services.lifecycle.fault(fault.reason)
    await _say_last_words(services, fault)


def _say_fault(fault: EngineFault) -> None:
    """In one line, whatever the device's library says."""
    print(f"prism-serve: fault: {' '.join(fault.reason.split())}", file=sys.stderr, flush=True)


async def _drain_when_asked(services: Services, stop: StopSignal) -> None:
    """First not ready, but open, until every proxy has noticed; then nobody new, and those inside may finish."""
    await stop.asked.wait()
    life = services.lifecycle
    life.leave()
    await wait_for(stop.hurry, services.settings.http.drain_propagation_s)
    life.drain()
    await until_empty(lambda: life.inside, services.settings.http.drain_timeout_s, stop.hurry)
    await _say_last_words(services, NotReady("the server is shutting down", "shutting_down"))


async def _say_last_words(services: Services, error: PrismError) -> None:
    """To everybody inside, whether the engine knows of the request or not yet."""
    life = services.lifecycle
    life.end(error)
    services.running().dispatcher.fail_all(error)
    await until_empty(lambda: life.inside, LAST_WORDS_S)
