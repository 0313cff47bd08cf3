"""How a decoded frame is to be seen: turned and mirrored by its display matrix, on white where it is transparent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from av import VideoFrame

TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    -180: Image.Transpose.ROTATE_180,
    -90: Image.Transpose.ROTATE_270,
}
"""What a display matrix's angle (degrees, counterclockwise) asks for. Other angles are not upright in any way."""
MIRRORED_TURNS = {
    0: Image.Transpose.FLIP_TOP_BOTTOM,
    90: Image.Transpose.TRANSVERSE,
    180: Image.Transpose.FLIP_LEFT_RIGHT,
    -180: Image.Transpose.FLIP_LEFT_RIGHT,
    -90: Image.Transpose.TRANSPOSE,
}
"""The same for a matrix that mirrors: FFmpeg's angle says where the upper edge goes, once the frame is upside down."""


def upright_size(frame: VideoFrame) -> tuple[int, int]:
    """Width and height of the picture that `upright` makes, in pixels."""
    return (frame.height, frame.width) if abs(round(frame.rotation)) == 90 else (frame.width, frame.height)


def upright(frame: VideoFrame, is_mirrored: bool) -> Image.Image:
    """8-bit RGB as it is to be seen."""
    if any(component.is_alpha for component in frame.format.components):
        rgba = Image.fromarray(frame.to_ndarray(format="rgba"))
        picture = Image.new("RGB", rgba.size, "white")
        picture.paste(rgba, mask=rgba.getchannel("A"))
    else:
        picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
    turn = (MIRRORED_TURNS if is_mirrored else TURNS).get(round(frame.rotation))
    return picture if turn is None else picture.transpose(turn)
