"""`prism-router`: sends each request to the engine pod that holds its pictures."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence

import uvloop

from prism_server.cli_support import ArgumentParser, console_script
from prism_server.router.server import serve
from prism_server.router.settings import ROUTER

EPILOG = """examples:
  prism-router --backends http://10.0.0.1:8000,http://10.0.0.2:8000
  prism-router --discovery.dns_name engines.example.internal
  prism-router --service demo-engine                      in Kubernetes, in the service's namespace"""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread keeps Python's lock while another wants it: streams must not wait for a body's JSON."""
GC_THRESHOLDS = (20_000, 20, 50)
"""Requests die by their reference counts. A pass over everything holds up all streams, so it comes seldom."""


@console_script("prism-router")
def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 stopped in order, 2 it could not start as configured."""
    parser = ArgumentParser("prism-router", "Send each request to the pod that holds its pictures.", EPILOG)
    parser.usage = "%(prog)s (--backends LIST | --service NAME | ...) [--config FILE] [--group.option VALUE ...]"
    ROUTER.add_arguments(parser)
    settings = ROUTER.settings_from(parser.parse_strictly(argv))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main(None))
