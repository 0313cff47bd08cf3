"""`prism-operator`: options from the command line, logs to stderr."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any

from prism_operator.options import HELP, OperatorOptions
from prism_server.cli_support import ArgumentParser, console_script, end_on_sigterm
from prism_server.errors import StartupError

LEASE_CALL_PART = 0.8
"""A call's time-out as a part of the renew deadline: a hanging call must not outlive the Lease."""


def build_parser() -> ArgumentParser:
    """Every field of OperatorOptions is a flag: `resync_s` is `--resync-s`."""
    parser = ArgumentParser("prism-operator", "Take care of the PrismDeployments of a cluster or a namespace.")
    parser.usage = "%(prog)s [--option VALUE ...]"
    levels = ["DEBUG", "INFO", "WARNING", "ERROR"]
    parser.add_argument("--log-level", default="INFO", choices=levels, help="default: %(default)s")
    for field in fields(OperatorOptions):
        _add_flag(parser, field)
    return parser


def _add_flag(parser: ArgumentParser, field: Field[Any]) -> None:
    flag, said = "--" + field.name.replace("_", "-"), field.metadata[HELP]
    if isinstance(field.default, bool):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=said)
        return
    kind = {str: "TEXT", int: "N", float: "SECONDS"}[type(field.default)]
    shown = "" if field.default == "" else " (default: %(default)s)"
    parser.add_argument(flag, type=type(field.default), default=field.default, metavar=kind, help=said + shown)


def parse(argv: Sequence[str]) -> tuple[OperatorOptions, str]:
    """Options and the log level. Raises StartupError for what cannot work."""
    values: dict[str, Any] = vars(build_parser().parse_strictly(argv))
    level = values.pop("log_level")
    options = OperatorOptions(**values)
    if not options.lease_retry_s < options.lease_renew_deadline_s < options.lease_duration_s:
        raise StartupError("--lease-retry-s must be below --lease-renew-deadline-s, and that below --lease-duration-s")
    if options.max_concurrent_rollouts < 1 or min(options.resync_s, options.eviction_retry_s) <= 0:
        raise StartupError("--max-concurrent-rollouts must be at least 1, --resync-s and --eviction-retry-s above 0")
    try:
        ports = [int(port) for port in options.api_server_ports.split(",")]
    except ValueError:
        raise StartupError("--api-server-ports must be a list of port numbers, such as 443,6443") from None
    if not all(0 < port < 65536 for port in ports):
        raise StartupError("--api-server-ports must be between 1 and 65535")
    return options, level


@console_script("prism-operator")
def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 stopped in order, 1 it has failed or lost its Lease, 2 it could not start as configured."""
    end_on_sigterm()  # imports take seconds below
    options, level = parse(argv)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level)))
    from kubernetes.config import ConfigException

    from prism_operator.api import TIMEOUT_S, Api
    from prism_operator.process import Operator

    try:
        api = Api.connect(min(TIMEOUT_S, LEASE_CALL_PART * options.lease_renew_deadline_s))
    except ConfigException as error:
        raise StartupError(f"no cluster, neither by a pod's service account nor by KUBECONFIG: {error}") from None
    return Operator(api, options).run()


if __name__ == "__main__":
    sys.exit(main(None))
