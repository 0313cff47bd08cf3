"""`prism-serve`: the engine server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prism_server.cli_support import console_script, end_on_sigterm


@console_script("prism-serve")
def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 stopped in order, 1 the engine broke or stands still, 2 it could not start as configured."""
    end_on_sigterm()  # imports take seconds from here on
    import asyncio

    from prism_server.http.logs import log_to_stderr
    from prism_server.settings_cli import load_settings

    settings = load_settings(argv)
    log_to_stderr(settings.log.level)

    import uvloop

    from prism_server.http.interpreter import share_the_lock
    from prism_server.serving.server import serve

    share_the_lock()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main(None))
