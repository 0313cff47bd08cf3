"""The gate's parts, and the whole of it for a moment: real processes, real HTTP."""

from __future__ import annotations

import json

import numpy as np
import pytest

from prism_server.bench import gate
from prism_server.bench.gate import PictureBodies, run_gate
from prism_server.bench.paced_engine import PacedDevice
from prism_server.engine.plan import SequenceRows, StepPlan
from prism_server.errors import StartupError
from prism_server.media.limits import MediaLimits
from prism_server.serving.early_media import take_media_out

LIMITS = MediaLimits(max_items=8, max_item_bytes=1 << 20, max_decoded_pixels=1 << 24)


def contents_of(request: bytes) -> set[bytes]:
    """The pictures of a request of the gate."""
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return set(take_media_out(bytearray(body), LIMITS)[1].bytes_of.values())


def test_bodies_have_the_size_that_was_asked_for_and_eight_pictures() -> None:
    bodies = PictureBodies(200_000, fresh=False)
    request = bodies.request(1)
    assert 180_000 < len(request) < 210_000
    assert len(contents_of(request)) == 8
    assert contents_of(bodies.request(2)) == contents_of(request)
    assert bodies.request(2) != request


def test_fresh_bodies_bring_other_contents_each_time() -> None:
    bodies = PictureBodies(200_000, fresh=True)
    assert not contents_of(bodies.request(1)) & contents_of(bodies.request(2))


def test_a_paced_device_runs_its_steps_one_after_the_other_and_draws_for_the_rows_that_ask() -> None:
    device = PacedDevice(1.0, (7, 8))
    positions = np.zeros((3, 1), dtype=np.int32)
    rows = [SequenceRows(slot, 5, 1, None, positions, draw) for slot, draw in ((0, 0), (1, None), (2, 3))]
    handles = [device.launch(StepPlan(step, sequences=tuple(rows))) for step in (1, 2)]
    results = [handle.wait() for handle in handles]
    assert [result.step for result in results] == [1, 2]
    assert all(len(result.token_ids) == 2 and set(result.token_ids) == {7, 8} for result in results)
    assert all(step.late_s >= 0.0 for step in device.steps)
    device.forget()
    assert device.steps == []
    slow = PacedDevice(3_600_000.0, (7,))  # nothing here takes so long: the second is launched while the first runs
    for step in (1, 2):
        slow.launch(StepPlan(step))
    first, second = slow.steps
    assert second.end_s - first.end_s == pytest.approx(3600.0)
    assert second.idle_s == 0.0


def test_both_halves_are_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "SETTLE_S", 0.1)
    flags = ["--num-streams=2", "--seconds=0.5", "--body-bytes=60000", "--bodies-per-s=10", "--fresh"]
    assert run_gate(flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["num_streams"] == 2
    assert report["quiet"]["bodies"] == 0
    assert report["busy"]["bodies"] >= 1
    for half in (report["quiet"], report["busy"]):
        assert half["steps"] > 0
        assert half["late_ms"]["p50"] <= half["late_ms"]["p99"] <= half["late_ms"]["max"]
        assert half["bystander_late_ms"]["max"] > 0.0
        assert half["loop_cpu_share"] > 0.0


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(StartupError, match="--step-ms"):
        run_gate(["--step-m=3"])
