"""An engine that hangs, or breaks, in the last step that anybody waits for: no orderly end, however the drain ended."""

from __future__ import annotations

import signal

import httpx
import pytest
from serving_support import chat_body, eventually, serving, sse_events

HELD = """
import sys, threading
from prism_server.engine import engine, runner
told_to_stop, stop = threading.Event(), engine.Engine.stop
def stopping(self):
    told_to_stop.set()
    return stop(self)
execute, steps = runner.Runner.execute, iter(range(30))
def held(self, plan):
    if next(steps, None) is None:
        print("the step is held", file=sys.stderr, flush=True)
        {instead}
    return execute(self, plan)
engine.Engine.stop, runner.Runner.execute, engine.STOP_TIMEOUT_S = stopping, held, {stop_timeout_s}
"""
"""The thirtieth step does not come to its end. There is no limit for a step on a CPU, unless one is set."""
HANGS = HELD.format(instead="threading.Event().wait()", stop_timeout_s=0.5)
BREAKS = HELD.format(instead="told_to_stop.wait(); raise RuntimeError('out of luck')", stop_timeout_s=60.0)
GOES_ON = HELD.format(instead="told_to_stop.wait()", stop_timeout_s=60.0)

STILL = "the engine stands still: told to stop, it did not end its step"
BROKEN = "the engine stopped: RuntimeError: out of luck"


@pytest.mark.parametrize(
    ("prelude", "drain_timeout_s", "is_hurried", "faults"),
    [
        pytest.param(HANGS, 0, False, [STILL], id="hangs"),
        pytest.param(HANGS, 3600, True, [STILL], id="hangs, and a second signal ends the drain"),
        pytest.param(BREAKS, 0, False, [BROKEN], id="breaks"),
        pytest.param(GOES_ON, 3600, True, [], id="only took long, and a second signal ends the drain"),
    ],
)
def test_a_drain_that_ends_within_a_step_waits_for_the_step_to_say_how_the_process_ended(
    prelude: str, drain_timeout_s: int, is_hurried: bool, faults: list[str]
) -> None:
    stream = chat_body("Hello", max_tokens=600, ignore_eos=True, stream=True)
    with serving(prelude, **{"http.drain_timeout_s": str(drain_timeout_s)}) as server:
        with httpx.stream("POST", f"{server.api}/v1/chat/completions", json=stream, timeout=120) as response:
            eventually(lambda: "the step is held\n" in server.stderr, 60)
            server.signal(signal.SIGTERM)
            if is_hurried:
                eventually(lambda: server.http.get(f"{server.api}/readyz").status_code == 503, 60)
                server.signal(signal.SIGTERM)
            *_, last, done = (data for _, data in sse_events(response))
        assert (last["error"]["code"], done) == ("shutting_down", "[DONE]")
        assert server.wait_exit() == (1 if faults else 0)
        said = [line for line in server.stderr if line.startswith("prism-serve: fault: ")]
        assert said == [f"prism-serve: fault: {fault}\n" for fault in faults]
        assert not faults or server.stderr[-1] == said[-1], "what Kubernetes keeps"
