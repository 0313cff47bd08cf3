"""Compiling all candidates of a search before it begins, in parallel."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

log = logging.getLogger(__name__)

Candidate = TypeVar("Candidate", bound=Hashable)


def compile_all(
    compile_one: Callable[[Candidate], str | None], tried: Sequence[Candidate], seconds: float
) -> list[Candidate]:
    """Compiles in parallel until the time is over; those that are known to run, in their order.

    `compile_one` is a module's function that fills a cache on disk, in a process of its own; it says what is wrong with
    a candidate, else None. What is left out is logged, by the candidate's `str`.
    """
    runnable = set()
    workers = max(1, (os.cpu_count() or 2) - 2)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = {pool.submit(compile_one, candidate): candidate for candidate in tried}
    try:
        for future in as_completed(futures, timeout=seconds):
            wrong = str(future.exception()) if future.exception() else future.result()
            if wrong is None:
                runnable.add(futures[future])
            else:
                log.warning("left out %s: %s", futures[future], wrong)
    except TimeoutError:
        log.warning("%d of %d candidates compiled in %.0f s", len(runnable), len(tried), seconds)
    pool.shutdown(cancel_futures=True)
    return [candidate for candidate in tried if candidate in runnable]
