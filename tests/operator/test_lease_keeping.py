"""How the Lease is kept: whatever its calls come to, this operator has ended before another one may begin."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Callable

import pytest
from kubernetes import client

from prism_operator import handlers
from prism_operator.api import Api, ApiError, Kind, Object
from prism_operator.lease import Elector
from prism_operator.options import OperatorOptions
from prism_operator.process import Operator
from prism_operator.tokens import KEY_BYTES, KEY_FIELD

OPTIONS = OperatorOptions(lease_retry_s=0.01, lease_renew_deadline_s=0.3)
PATIENCE_S = 60.0


class Told(Elector):
    """Renews as the test says."""

    def __init__(
        self,
        renew: Callable[[], bool],
        options: OperatorOptions = OPTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(Api(client.ApiClient()), options, "me", clock)
        self.renew = renew

    def try_hold(self) -> bool:
        return self.renew()


def kept(elector: Elector, stop: threading.Event | None = None) -> list[str]:
    """What was said of a lost Lease, until it is no longer kept."""
    lost: list[str] = []
    keeper = threading.Thread(target=elector.keep, args=(stop or threading.Event(), lost.append))
    keeper.start()
    keeper.join(PATIENCE_S)
    assert not keeper.is_alive()
    return lost


def test_a_renewal_that_hangs_is_not_waited_for() -> None:
    answered, is_lost = threading.Event(), threading.Event()

    def hang() -> bool:
        answered.wait(PATIENCE_S)
        return True

    said: list[str] = []

    def lost(reason: str) -> None:
        said.append(reason)
        is_lost.set()

    keeper = threading.Thread(target=Told(hang).keep, args=(threading.Event(), lost))
    keeper.start()
    assert is_lost.wait(PATIENCE_S / 2), "the call hangs still"
    assert not answered.is_set()
    answered.set()
    keeper.join(PATIENCE_S)
    assert said == ["no renewal within 0.3 s: no answer"]


@pytest.mark.parametrize("error", [ApiError(0, "Unreachable", "no route"), ValueError("half an answer"), OSError("?")])
def test_no_error_leaves_the_lease_without_a_keeper(error: Exception) -> None:
    now_s = [0.0]

    def fail() -> bool:
        now_s[0] += 40.0
        raise error

    options = OperatorOptions(lease_retry_s=0.001, lease_renew_deadline_s=60.0)
    assert kept(Told(fail, options, lambda: now_s[0])) == [f"no renewal within 60 s: {error}"]


def answering(*answers: bool, stop: threading.Event) -> Callable[[], bool]:
    """Renewals: one that fails for each False. After them the process is told to go."""
    left = iter(answers)

    def renew() -> bool:
        answer = next(left, None)
        if answer is None:
            stop.set()
        if answer is False:
            raise ValueError("half an answer")
        return True

    return renew


def test_an_error_that_passes_costs_nothing() -> None:
    stop = threading.Event()
    renew = answering(True, False, True, stop=stop)
    assert kept(Told(renew, OperatorOptions(lease_retry_s=0.001, lease_renew_deadline_s=PATIENCE_S)), stop) == []


def test_a_deadline_counts_from_when_the_last_good_renewal_began() -> None:
    """Its record may be as old as that for whoever waits for the Lease."""
    now_s, stop = [0.0], threading.Event()
    renew = answering(True, False, stop=stop)

    def slow() -> bool:
        now_s[0] += 40.0
        return renew()

    options = OperatorOptions(lease_retry_s=0.001, lease_renew_deadline_s=60.0)
    assert kept(Told(slow, options, lambda: now_s[0]), stop) == ["no renewal within 60 s: half an answer"]


def test_the_first_deadline_counts_from_when_the_lease_was_asked_for() -> None:
    now_s, answers = [0.0], iter([True])

    def slow_once() -> bool:
        if next(answers, None) is None:
            raise ValueError("half an answer")
        now_s[0] += 61.0
        return True

    elector = Told(slow_once, OperatorOptions(lease_retry_s=0.001, lease_renew_deadline_s=60.0), lambda: now_s[0])
    assert elector.wait(threading.Event(), lambda: None)
    [reason] = kept(elector)
    assert reason.startswith("no renewal within 60 s")


def test_a_process_that_ends_has_lost_nothing() -> None:
    stop = threading.Event()

    def taken() -> bool:
        stop.set()
        return False

    assert kept(Told(taken), stop) == []


class Free(Api):
    """Has a key for the operator, and nothing else."""

    def __init__(self) -> None:
        super().__init__(client.ApiClient())

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return {"metadata": {"name": name}, "data": {KEY_FIELD: base64.b64encode(b"k" * KEY_BYTES).decode()}}

    def list(self, kind: Kind, namespace: str = "", labels: str = "", fields: str = "") -> list[Object]:
        return []

    def has(self, kind: Kind) -> bool:
        return True


def test_a_process_that_is_told_to_go_before_it_watches_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch(*_: object) -> None:
        pytest.fail("it watches")

    monkeypatch.setattr(handlers, "watch", watch)
    operator = Operator(Free(), OPTIONS)
    operator._stop.set()
    asyncio.run(operator._lead())
