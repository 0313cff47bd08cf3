"""Pixels of clips against Hugging Face's video processor: run where it can run, recorded where it needs torchvision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_making import lossless, speckled
from clip_samples import clip, clip_pipeline, frame_list, shown_frames
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

FIXTURE = Path(__file__).parent / "fixtures" / "clip_pixels.npz"
"""Made by `record_clip_pixels.py`: transformers 5.17.0, torchvision 0.29.2, the demo model's processor."""
SHARE = 11
"""Every so many patches are kept."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    count: int
    fps: float
    width: int
    height: int


CASES = (
    Case("no-resize", 20, 10.0, 96, 64),
    Case("rounded-down", 30, 30.0, 100, 70),
    Case("rounded-up", 9, 4.0, 120, 88),
    Case("too-large", 50, 10.0, 320, 240),
    Case("too-small", 8, 8.0, 20, 14),
    Case("odd", 5, 2.0, 96, 96),
    Case("two", 2, 2.0, 128, 96),
    Case("thin", 12, 6.0, 320, 16),
    Case("wider-and-lower", 12, 6.0, 48, 175),
    Case("narrower-and-higher", 45, 30000 / 1001, 175, 48),
    Case("tiny", 3, 1.0, 13, 15),
    Case("a-line", 7, 25.0, 200, 1),
)
MAX_SHARE_OFF = 0.01
"""Pillow and torch round their resizing weights differently: of one value in a hundred, by one level of 256 ..."""
MAX_SHARE_FAR_OFF = 1e-4
"""... and of one in ten thousand, by two."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pixels_grid_and_frames_equal_the_recorded_reference(case: Case) -> None:
    recorded = np.load(FIXTURE)
    pipeline = clip_pipeline()
    item = clip(lossless(speckled(case.count, case.width, case.height), case.fps))
    facts = pipeline.describe(item)
    pixels = pipeline.materialise(item, facts).result(60).patches.pixels
    pipeline.close()
    assert facts.clip is not None
    assert facts.grid == tuple(recorded[f"{case.name}.grid"])
    assert facts.clip.frames.tolist() == recorded[f"{case.name}.frames"].tolist()
    expected = recorded[f"{case.name}.pixels"]
    off = np.abs(pixels[::SHARE].astype(np.int16) - expected)
    if case.name in ("no-resize", "two", "odd"):
        assert not off.any()
    assert off.max() <= 2
    assert (off > 0).mean() <= MAX_SHARE_OFF
    assert (off > 1).mean() <= MAX_SHARE_FAR_OFF


@pytest.mark.parametrize("count", [2, 4, 5, 8, 11, 12])
def test_patches_without_resizing_equal_the_reference_that_cuts_them_here(count: int) -> None:
    frames = speckled(count, 96, 64, seed=count)
    pipeline = clip_pipeline()
    item = frame_list(frames)
    facts = pipeline.describe(item)
    pixels = pipeline.materialise(item, facts).result(60).patches.pixels
    pipeline.close()
    video = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)[None]
    expected, *grid = Qwen3VLVideoProcessor().patchify(video, 16, 2, 2)
    assert facts.grid == tuple(grid)
    np.testing.assert_array_equal(pixels.reshape(len(pixels), -1), expected[0].numpy())


def test_a_list_and_a_lossless_file_of_the_same_frames_show_the_same_pixels() -> None:
    frames = speckled(9, 100, 70)
    pipeline = clip_pipeline()
    listed, filed = (shown_frames(pipeline, item) for item in (frame_list(frames), clip(lossless(frames, 2))))
    pipeline.close()
    np.testing.assert_array_equal(listed, filed)
