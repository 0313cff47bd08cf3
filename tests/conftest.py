"""For every test: hypothesis looks for wrong answers, not for slow ones (a machine under load is no failure)."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("prism", deadline=None)
settings.load_profile("prism")
