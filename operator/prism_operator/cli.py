"""`prism-operator`: options from the command line, logs to stderr."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from prism_operator.options import OperatorOptions
from prism_server.cli_support import end_on_sigterm

LEASE_CALL_PART = 0.8
"""A call's time-out as a part of the renew deadline: a hanging call must not outlive the Lease."""


def parse(argv: Sequence[str] | None = None) -> tuple[OperatorOptions, str]:
    """Options and the log level. Every field of OperatorOptions is a flag: `resync_s` is `--resync-s`."""
    parser = argparse.ArgumentParser(prog="prism-operator", description="Runs PrismDeployments.")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    for field in fields(OperatorOptions):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default, metavar="VALUE")
    values: dict[str, Any] = vars(parser.parse_args(argv))
    level = values.pop("log_level")
    options = OperatorOptions(**values)
    if not options.lease_retry_s < options.lease_renew_deadline_s < options.lease_duration_s:
        parser.error("--lease-retry-s must be below --lease-renew-deadline-s, and that below --lease-duration-s")
    if options.max_concurrent_rollouts < 1 or min(options.resync_s, options.eviction_retry_s) <= 0:
        parser.error("--max-concurrent-rollouts must be at least 1, --resync-s and --eviction-retry-s above 0")
    try:
        ports = [int(port) for port in options.api_server_ports.split(",")]
    except ValueError:
        parser.error("--api-server-ports must be a list of port numbers, such as 443,6443")
    if not all(0 < port < 65536 for port in ports):
        parser.error("--api-server-ports must be between 1 and 65535")
    return options, level


def main(argv: Sequence[str] | None = None) -> int:
    end_on_sigterm()  # imports take seconds below
    options, level = parse(argv)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level)))
    from prism_operator.api import TIMEOUT_S, Api
    from prism_operator.process import Operator

    api = Api.connect(min(TIMEOUT_S, LEASE_CALL_PART * options.lease_renew_deadline_s))
    return Operator(api, options).run()


if __name__ == "__main__":
    sys.exit(main())
