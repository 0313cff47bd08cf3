"""What the interpreter is told, so that streams and the engine's thread seldom wait for it."""

from __future__ import annotations

import gc
import sys

SWITCH_INTERVAL_S = 0.0005
"""How long a thread keeps Python's lock while another wants it: neither the engine's thread nor streams may wait
for the JSON of a body."""
GC_THRESHOLDS = (20_000, 20, 50)
"""Objects die by their reference counts; what the collector is for (cycles of failed requests) is little. A pass over
everything stops every thread, for tens of milliseconds with a full prefix index, so it comes seldom."""


def share_the_lock() -> None:
    """At the start of the process."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def set_loaded_objects_aside() -> None:
    """Once all is loaded: the objects of the libraries, half a million with torch, are never looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
