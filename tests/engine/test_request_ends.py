"""How requests end, alone and all together, and what is left of them."""

from __future__ import annotations

import gc
import random
import threading
import time
from types import SimpleNamespace

import pytest
from engine_support import Driver, Parts, Reply, alone, running_engine, settings_with, tokens_of, wait_until
from PIL import Image
from reference_answers import draw_prompts, small_pictures

from prism_server.demo_model import LAYOUT_BY_NAME, draw_sample, encode_jpeg, encode_png
from prism_server.engine.engine import Engine
from prism_server.engine.executor import StepHandle
from prism_server.engine.owner import MediumNotCopied
from prism_server.engine.plan import StepPlan
from prism_server.engine.sequence import Phase
from prism_server.engine.staging import StagedItem
from prism_server.errors import BadRequest, EngineFault, PrismError
from prism_server.media.cache import MEDIA_FAILED
from prism_server.media.item import IsWanted, ItemFacts, MediaItem, Patches, Unwanted
from prism_server.media.kinds import ImageKind
from prism_server.model.vision import Features, VisionState, VisionTower

SEEN = "Describe what you see."
MATE_TOKENS = 300
"""Long enough for others to come and go beside it."""


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PARKED, Phase.MEDIA, Phase.PREFILL, Phase.DECODE])
def test_a_request_that_is_cancelled_in_any_phase_ends_once_and_costs_its_mates_no_token(phase: Phase) -> None:
    sample = draw_sample(random.Random(9), LAYOUT_BY_NAME["pages-4"])
    pictures = [encode_png(picture) for picture in sample.pictures]
    mate_parts = ("Hello!",)
    (expected,) = alone([mate_parts], MATE_TOKENS, ignore_eos=True)
    slots = 1 if phase is Phase.WAITING else 8
    with running_engine(engine__max_running_sequences=slots, engine__chunk_tokens=8, media__workers=1) as driver:
        pictures_may_come = threading.Event()
        driver.engine.media._workers.submit(pictures_may_come.wait)
        if phase in (Phase.PREFILL, Phase.DECODE):
            pictures_may_come.set()
        leader = None
        if phase is Phase.PARKED:
            leader = driver.submit([*pictures, SEEN], 4)
            wait_for_media(driver, leader)
        with driver.held():
            mate = driver.submit(mate_parts, MATE_TOKENS, ignore_eos=True)
            reply = driver.submit([*pictures, "What is this?"], 1000, ignore_eos=True)
            driver.cancel_in_phase(reply, phase)
        assert reply.wait().reason == "cancelled"
        pictures_may_come.set()
        assert mate.wait().tokens == expected
        if leader is not None:
            assert leader.wait().error is None
        driver.engine.cancel(reply.request_id)
        driver.settle()
        assert len(reply.ends) == 1
        assert driver.ask([*pictures, "What is this?"], 8).reason in ("stop", "length")


def test_media_that_nobody_waits_for_any_more_are_not_prepared_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two requests for a picture: when the second has gone, too; whoever comes later gets it all the same."""
    prepare = ImageKind.prepare

    def go_on_while_wanted(kind: ImageKind, item: MediaItem, facts: ItemFacts, is_wanted: IsWanted) -> Patches:
        while is_wanted():
            time.sleep(0.01)
        raise Unwanted

    monkeypatch.setattr(ImageKind, "prepare", go_on_while_wanted)
    parts = [*small_pictures(6, 1), SEEN]
    with running_engine() as driver:
        both = [driver.submit(parts, 4) for _ in range(2)]
        wait_for_media(driver, both[0])
        driver.engine.cancel(both[0].request_id)
        assert both[0].wait().reason == "cancelled"
        time.sleep(0.2)  # for a worker that would stop
        assert driver.engine.media.stats().cache.in_flight_now == 1
        driver.engine.cancel(both[1].request_id)
        wait_until(lambda: driver.engine.media.stats().cache.in_flight_now == 0)
        monkeypatch.setattr(ImageKind, "prepare", prepare)
        assert driver.ask(parts, 4).error is None


def test_a_fault_waits_for_no_media_in_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, begun, unwanted = ImageKind.prepare, threading.Event(), threading.Event()

    def wait_until_unwanted(kind: ImageKind, item: MediaItem, facts: ItemFacts, is_wanted: IsWanted) -> Patches:
        begun.set()
        while is_wanted() and not unwanted.is_set():
            time.sleep(0.01)
        unwanted.set()
        return prepare(kind, item, facts, is_wanted)

    def fail(*_: object) -> StepHandle:
        raise RuntimeError("an illegal memory access")

    with running_engine() as driver:
        driver.prompt(["Hello!"])
        monkeypatch.setattr(ImageKind, "prepare", wait_until_unwanted)
        waits = driver.submit([*small_pictures(6, 1), SEEN], 4)
        assert begun.wait(60)
        wait_until(lambda: driver.engine.turn_began_s is None)  # its turn launches a step, too
        monkeypatch.setattr(driver.engine._owner._executor, "launch", fail)
        driver.submit(["Hello!"], 4)
        assert unwanted.wait(60)
        assert isinstance(waits.wait().error, EngineFault)


def wait_for_media(driver: Driver, reply: Reply) -> None:
    """Until the request waits for its media, which do not come before the test lets them."""

    def waits() -> bool:
        sequences = driver.engine._owner._answers.sequences_of(reply.request_id)
        return bool(sequences) and sequences[0].phase is Phase.MEDIA

    wait_until(waits)


def test_a_deadline_ends_a_request_with_its_reason_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's clock is put forward: a long answer may be over before a real deadline, or not begun."""
    ahead_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr("prism_server.engine.owner.time", clock)
    with running_engine(engine__max_running_sequences=1) as driver:
        with driver.held():
            running = driver.submit(["Hello!"], 8000, ignore_eos=True, deadline_s=2000.0)
            queued = driver.submit(["Hello!"], 10, deadline_s=1000.0)
            patient = driver.submit(["Hello!"], 10, deadline_s=60_000.0)
        running.wait_for_tokens(1)
        ahead_s = 3000.0
        assert queued.wait().reason == "deadline"
        assert queued.tokens == []
        assert running.wait().reason == "deadline"
        assert 0 < len(running.tokens) < 8000
        assert patient.wait().reason in ("stop", "length")


def test_a_prompt_that_can_never_fit_is_refused_with_the_arithmetic_and_encodes_nothing() -> None:
    pictures = small_pictures(10, 4)
    with running_engine(num_pages=4, engine__max_context_tokens=8192, engine__feature_cache_bytes=40_000) as driver:
        with pytest.raises(BadRequest, match="64"):
            driver.prompt([*pictures, *pictures, SEEN])
        fits = driver.ask([pictures[0], SEEN], 4)
        assert fits.error is None
        refused = driver.ask([encode_png(Image.new("RGB", (192, 192))), SEEN])
        assert isinstance(refused.error, BadRequest)
        assert "encoder output" in refused.error.reason
        assert driver.counters()["encoded_items"] == 1
        assert driver.ask([pictures[1], SEEN], 4).error is None


# -- what fails alone ------------------------------------------------------------------------------------------------


def test_an_encoder_that_returns_another_number_of_rows_than_the_placeholders_fails_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It shares a step, and the encoder's batch, with the others."""
    odd = encode_png(draw_sample(random.Random(14), LAYOUT_BY_NAME["scene-128x160"]).pictures[0])
    others: list[Parts] = [(picture, SEEN) for picture in small_pictures(14, 4)]
    expected = alone(others)
    finish = VisionTower.finish

    def finish_short(self: VisionTower, state: VisionState) -> Features:
        features = finish(self, state)
        if features.num_tokens == 20:
            return Features(features.main[:-1], tuple(level[:-1] for level in features.deepstack))
        return features

    monkeypatch.setattr(VisionTower, "finish", finish_short)
    with running_engine() as driver:
        replies = [driver.submit(parts) for parts in [*others[:2], (odd, SEEN), (odd, "What is it?"), *others[2:]]]
        for reply in replies:
            reply.wait()
        assert tokens_of([*replies[:2], *replies[4:]]) == expected
        for failed in replies[2:4]:
            assert isinstance(failed.error, PrismError)
            assert "19 rows for a medium of 20 tokens" in failed.error.reason
        monkeypatch.setattr(VisionTower, "finish", finish)
        again = driver.ask([odd, SEEN])
        assert again.error is None
        assert again.usage.cached_media_tokens == 0  # nothing was published of what had no features
        assert [again.tokens] == alone([(odd, SEEN)])


def test_a_failed_preparation_fails_those_that_asked_for_it_and_is_not_cached() -> None:
    whole = encode_jpeg(draw_sample(random.Random(15), LAYOUT_BY_NAME["scene-192"]).pictures[0])
    half = whole[: len(whole) // 2]
    good: Parts = (*small_pictures(15, 1), SEEN)
    with running_engine() as driver:
        broken = [driver.submit([half, question]) for question in (SEEN, "What is shown?", SEEN)]
        beside = driver.submit(good)
        for reply in broken:
            assert isinstance(reply.wait().error, BadRequest)
        assert tokens_of([beside.wait()]) == alone([good])
        assert isinstance(driver.ask([half, SEEN]).error, BadRequest)  # asked again, prepared again
        assert driver.ask([whole, SEEN]).error is None
        assert driver.engine.media.stats().cache.in_flight_now == 0


def test_one_broken_picture_among_good_ones_fails_its_request_and_leaves_the_good_ones_usable() -> None:
    whole = encode_jpeg(draw_sample(random.Random(16), LAYOUT_BY_NAME["scene-192"]).pictures[0])
    a, b = small_pictures(16, 2)
    with running_engine() as driver:
        mixed = driver.ask([a, whole[: len(whole) // 2], b, SEEN])
        assert isinstance(mixed.error, BadRequest)
        parts = (a, b, SEEN)
        assert [driver.ask(parts).tokens] == alone([parts])


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (RuntimeError("no host memory is left"), MediumNotCopied.code, "no host memory is left"),
        (IndexError("not for the client"), MEDIA_FAILED, "its log says why"),
    ],
)
def test_a_picture_that_cannot_be_copied_for_the_device_ends_its_request_alone(
    raised: Exception, code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (*small_pictures(18, 1), SEEN)
    with running_engine() as driver:
        runner = driver.engine._parts.executor
        prepare, failures = runner.prepare, [raised]

        def fails_once(patches: Patches) -> StagedItem:
            if failures:
                raise failures.pop()
            return prepare(patches)

        monkeypatch.setattr(runner, "prepare", fails_once)
        failed = driver.ask(parts)
        assert isinstance(failed.error, BadRequest | MediumNotCopied)
        assert failed.error.code == code
        assert said in failed.error.reason
        assert [driver.ask(parts).tokens] == alone([parts])


# -- what is left ----------------------------------------------------------------------------------------------------


def test_nothing_grows_with_the_number_of_requests_served() -> None:
    """Hundreds of requests that end in every way; `running_engine` also checks that pages and queues are empty."""
    prompts = draw_prompts(seed=17, count=30, most_vision_tokens=48)
    rng = random.Random(17)
    with running_engine(
        num_pages=60, kv__host_bytes=4 << 20, engine__feature_cache_bytes=200_000, media__cache_bytes=400_000
    ) as driver:
        sizes = []
        for _ in range(3):
            replies = []
            for _ in range(100):
                parts = rng.choice(prompts)
                replies.append(driver.submit(parts, rng.randint(1, 12), n=rng.choice([1, 1, 1, 2]), stop=("e",)))
                if rng.random() < 0.2:
                    driver.engine.cancel(rng.choice(replies).request_id)
            ends = [reply.wait().ends for reply in replies]
            assert all(len(end) == 1 for end in ends)
            driver.ask(["Hello!"], 1)  # a step that brings the device what was dropped since the last one
            driver.settle()
            sizes.append(held_by(driver))
            assert len(driver.engine._scheduler.counters) < 40, "each has a name of its own, none a request's"
        stats = driver.engine.stats()
        assert (stats.running_now, stats.waiting_now) == (0, 0)
        assert stats.free_pages_now + stats.evictable_pages_now == stats.total_pages
        assert len(driver.engine._owner._answers) == 0
        assert sizes[0] == sizes[1] == sizes[2]


def held_by(driver: Driver) -> dict[str, int]:
    """Sizes of everything that could keep something of a request."""
    parts = driver.engine._parts
    scheduler, runner = parts.scheduler, parts.executor
    gc.collect()
    return {
        "answers": len(driver.engine._owner._answers),
        "launched": scheduler.num_launched,
        "staged": len(runner.encoder.staged) + scheduler.desk.num_staged + scheduler.desk.num_pending,
        "encoding": len(runner.encoder.encoding),
        "features without bookkeeping": sum(not scheduler.features.holds(key) for key in runner.encoder.features),
        "led keys": len(scheduler.in_flight._leaders),
    }


def test_the_caches_are_forgotten_on_request() -> None:
    parts = (*small_pictures(18, 2), SEEN)
    with running_engine() as driver:
        first = driver.ask(parts)
        driver.engine.reset_cache()
        second = driver.ask(parts)
        assert (second.usage.cached_tokens, second.usage.encoded_items) == (0, 2)
        assert second.tokens == first.tokens
        driver.engine.reset_cache()
        driver.ask(["Hello!"], 1)
        assert driver.engine.stats().feature_bytes_now == 0


# -- the end of the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["launch", "step"])
def test_what_the_device_raises_ends_everyone_with_an_engine_fault(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine() as driver:
        runner = driver.engine._parts.executor
        running = [driver.submit(["Hello!"], 4000, ignore_eos=True) for _ in range(3)]
        for reply in running:
            reply.wait_for_tokens(2)

        def fail(plan: StepPlan) -> StepHandle:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(runner, "launch" if where == "launch" else "execute", fail)
        for reply in running:
            assert isinstance(reply.wait().error, EngineFault)
            assert "the device is gone" in reply.error.reason
            assert len(reply.ends) == 1
        assert driver.engine.fault is not None
        assert "the device is gone" in driver.engine.fault.reason
        with pytest.raises(EngineFault, match="the device is gone"):
            driver.submit(["Hello!"])


def test_a_stopped_engine_ends_its_requests_and_has_no_fault() -> None:
    engine = Engine.build(settings_with())
    reply = Driver(engine).submit(["Hello!"], 4000, ignore_eos=True).wait_for_tokens(1)
    engine.stop()
    assert isinstance(reply.wait().error, EngineFault)
    assert len(reply.ends) == 1
    assert engine.fault is None
