"""One server for the tests that need nothing special of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving_support import ServerProcess, serving


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    # Tests compare texts, cold and hot, alone and beside others. On narrow pages the last bit of a sum may decide how a
    # row is rounded, and so which of two equally likely tokens is said.
    options = {"engine.max_running_sequences": "16", "kv.dtype": "fp32", "kv.memory_bytes": str(96 << 20)}
    with serving(**options) as running:
        yield running
