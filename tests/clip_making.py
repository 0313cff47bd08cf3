"""Clips made in code: frames that tell their number by their brightness, as files of every kind."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

LEVEL = 8
"""Steps of brightness between two frames: more than any encoder here blurs."""

Picture = npt.NDArray[np.uint8]


def numbered(count: int, width: int = 96, height: int = 64) -> list[Picture]:
    """uint8 [height, width, 3] frames; frame i is brighter than frame i - 1 by `LEVEL` (again from 0 after 32)."""
    return [np.full((height, width, 3), i * LEVEL % 256, dtype=np.uint8) for i in range(count)]


def number_of(level: float) -> int:
    """Which of the first 32 numbered frames has this brightness."""
    return round(level / LEVEL)


def speckled(count: int, width: int, height: int, seed: int = 0) -> list[Picture]:
    """Noise over a ramp that moves: every pixel and every frame matters."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 160, width)[None, :, None]
    noise = rng.integers(0, 64, (count, height, width, 3))
    return [(ramp + noise[i] + i % 32).astype(np.uint8) for i in range(count)]


@contextmanager
def priority_kept() -> Iterator[None]:
    """SVT-AV1, called by root, makes the thread that calls it a real-time one and leaves it so: with all that it starts
    from then on, this thread would starve everybody else on the machine."""
    if not hasattr(os, "sched_setscheduler"):
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


@priority_kept()
def clip_file(
    frames: Sequence[Picture],
    fps: float | Fraction = 10,
    fmt: str = "mp4",
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    *,
    times: Sequence[int] | None = None,
    rotation: int | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> bytes:
    """The frames as a file; `times` are presentation times in thousandths of a second instead of an even rate.

    The same bytes every time and on every machine: without random identifiers, and by one thread, because what several
    make depends on how many cores there are.
    """
    out = io.BytesIO()
    rate = Fraction(fps).limit_denominator(100_000)
    with av.open(out, "w", format=fmt, options={"fflags": "bitexact"} | (container_options or {})) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.codec_context.thread_count = 1
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pix_fmt
        stream.options = options or {}
        if times is not None:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = (i, 1 / rate) if times is None else (times[i], Fraction(1, 1000))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def lossless(frames: Sequence[Picture], fps: float | Fraction = 10, **more: Any) -> bytes:
    """FFV1 in RGB in Matroska: decodes to the very same pixels."""
    return clip_file(frames, fps, "matroska", "ffv1", "bgr0", **more)


def png(pixels: Picture) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()
