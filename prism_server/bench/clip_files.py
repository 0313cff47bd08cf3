"""Clips as files without any loss: what is decoded equals the pictures that they were made of, bit for bit."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from PIL import Image


def lossless_clip(pictures: Sequence[Image.Image], fps: float) -> bytes:
    """RGB pictures of one size as a Matroska file: FFV1, in RGB, at an even rate."""
    import av  # only who makes files needs it

    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=Fraction(fps))
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt = "bgr0"
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.asarray(picture.convert("RGB")), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()
