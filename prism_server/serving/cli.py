"""`prism-serve`: the engine server."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

import uvloop

from prism_server.cli_support import console_script
from prism_server.serving.interpreter import share_the_lock
from prism_server.serving.server import serve
from prism_server.settings_cli import load_settings


@console_script("prism-serve")
def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 stopped in order, 1 the engine broke, 2 it could not start as configured."""
    settings = load_settings(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    share_the_lock()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main(None))
