"""For every test: hypothesis looks for wrong answers, not for slow ones (a machine under load is no failure).

Where `CI` is set the examples are the same every time: what a change breaks shows there, and nothing else. Everywhere
else each run draws examples of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

settings.register_profile(
    "prism", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("prism")

if not Path("/dev/nvidiactl").exists():
    # Triton decides when it is imported, whichever test does so first: without a GPU, kernels run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
