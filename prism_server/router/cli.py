"""`prism-router`: sends each request to the engine pod that holds its pictures."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prism_server.cli_support import ArgumentParser, console_script, end_on_sigterm

EPILOG = """examples:
  prism-router --backends http://10.0.0.1:8000,http://10.0.0.2:8000
  prism-router --discovery.dns_name engines.example.internal
  prism-router --service demo-engine                      in Kubernetes, in the service's namespace"""


@console_script("prism-router")
def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 stopped in order, 2 it could not start as configured."""
    end_on_sigterm()  # imports take seconds from here on
    import asyncio

    from prism_server.http.logs import log_to_stderr
    from prism_server.router.settings import ROUTER

    parser = ArgumentParser("prism-router", "Send each request to the pod that holds its pictures.", EPILOG)
    parser.usage = "%(prog)s (--backends LIST | --service NAME | ...) [--config FILE] [--group.option VALUE ...]"
    ROUTER.add_arguments(parser)
    settings = ROUTER.settings_from(parser.parse_strictly(argv))
    log_to_stderr(settings.log.level)

    import uvloop

    from prism_server.http.interpreter import set_loaded_objects_aside, share_the_lock
    from prism_server.router.server import serve

    share_the_lock()
    set_loaded_objects_aside()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main(None))
