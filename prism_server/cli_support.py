"""What every console script shares: what a user can put right is one line on stderr and exit code 2, no traceback.

Imports nothing of weight: a server hears SIGTERM from here on, and what takes seconds comes later.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from prism_server.errors import BadRequest, StartupError

USER_ERROR_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

Main = Callable[[Sequence[str]], int | None]


class ArgumentParser(argparse.ArgumentParser):
    """argparse that raises `StartupError` instead of printing its usage, and accepts no abbreviations."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise StartupError(message)

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`, but an unknown option's error names the nearest one that exists."""
        parsed, unknown = self.parse_known_args(argv)
        if unknown:
            flag = unknown[0].split("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            raise StartupError(f"unknown argument {flag!r}{nearest(flag, known)}")
        return parsed


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: a guess at what was meant, or where to look."""
    guesses = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {guesses[0]}?" if guesses else "; --help lists every option"


def console_script(prog: str) -> Callable[[Main], Callable[[Sequence[str] | None], int]]:
    """Makes `main(argv)` the entry point of the script `prog`.

    A `StartupError` or `BadRequest` becomes `prog: error: reason` on stderr and exit code 2; Ctrl-C is exit code 130.
    Every other exception is a fault of Prism and keeps its traceback.
    """

    def decorate(main: Main) -> Callable[[Sequence[str] | None], int]:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            try:
                return main(sys.argv[1:] if argv is None else argv) or 0
            except (StartupError, BadRequest) as error:
                print(f"{prog}: error: {' '.join(error.reason.split())}", file=sys.stderr)
                return USER_ERROR_EXIT_CODE
            except KeyboardInterrupt:
                return INTERRUPTED_EXIT_CODE

        return run

    return decorate


def end_on_sigterm() -> None:
    """SIGTERM ends the process at once, with exit code 0, until the server has a handler of its own.

    To be called before the first import that takes long. The first process of a container has no default action for
    SIGTERM: the kernel drops the signal where there is no handler, and a pod that is told to go while it imports would
    stay for all of its grace. 0, as in every orderly stop: nothing has been opened or promised yet, and the kubelet
    would report any other code as a failure of the pod.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(*_: object) -> None:
    os._exit(0)  # an exception would come out of whatever import is under way, and libraries catch those
