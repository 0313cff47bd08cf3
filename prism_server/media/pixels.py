"""A Pillow picture's own memory as an array, by the Arrow C data interface.

`np.asarray` of a picture packs its pixels into pieces and joins those, all with Python's lock held: workers that do so
keep the engine's thread from its launches. Here nothing is copied; numpy gives the lock away while it cuts the view.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from prism_server.media.processor_config import CHANNELS

STORED_CHANNELS = 4
"""Pillow keeps RGB with a byte of padding behind each pixel."""


class _ArrowArray(ctypes.Structure):
    """`struct ArrowArray` of https://arrow.apache.org/docs/format/CDataInterface.html, as far as it is read.

    Of a picture: a list for each pixel; its one child are the lists' values, in `buffers[1]`.
    """


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
]

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class _Stored:
    """What numpy makes a view of, and what keeps the memory for as long as there is one."""

    __array_interface__: dict[str, Any]
    owner: object


def rgb_pixels(picture: Image.Image) -> npt.NDArray[np.uint8]:
    """The pixels of an RGB picture, uint8 [height, width, 3], read-only: a view of what the picture holds now.

    A copy only where that is in several pieces, from some 4 million pixels on. Raises ValueError for another mode.
    """
    if picture.mode != "RGB":
        raise ValueError(f"a picture of mode {picture.mode!r} has no RGB pixels")
    try:
        _, capsule = picture.__arrow_c_array__()
    except ValueError:
        return np.asarray(picture)
    values = _ArrowArray.from_address(_pointer_of(capsule, b"arrow_array")).children[0].contents
    shape = (picture.height, picture.width, STORED_CHANNELS)
    interface = {"version": 3, "shape": shape, "typestr": "|u1", "data": (values.buffers[1], True)}
    return np.asarray(_Stored(interface, capsule))[..., :CHANNELS]
