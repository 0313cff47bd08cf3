"""Two engines for the tests that need nothing special of them. Their KV types differ, as during a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from router_http_support import Engine, RouterProcess, routing


@pytest.fixture(scope="session")
def engines() -> Iterator[tuple[Engine, Engine]]:
    with ExitStack() as stack:
        fp8, bf16 = Engine(**{"kv.dtype": "fp8"}), Engine(**{"kv.dtype": "bf16"})
        yield stack.enter_context(fp8), stack.enter_context(bf16)


@pytest.fixture
def router(engines: tuple[Engine, Engine]) -> Iterator[RouterProcess]:
    """Before the two engines."""
    with routing(*[engine.backend for engine in engines]) as running:
        yield running
