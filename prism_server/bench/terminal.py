"""Output for people: a little colour and a progress line on a terminal, plain lines everywhere else."""

from __future__ import annotations

import os
import sys

BOLD, FAINT, GREEN, RED, CYAN = "1", "2", "32", "31", "36"


class Terminal:
    """Writes to stdout at once. Colour only on a terminal, and not with `NO_COLOR` set (no-color.org)."""

    def __init__(self) -> None:
        self._is_live = sys.stdout.isatty()
        self._has_colour = self._is_live and not os.environ.get("NO_COLOR")
        self._stage = ""

    def write(self, text: str) -> None:
        """Without a line's end."""
        print(text, end="", flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def title(self, text: str) -> None:
        self.say(self._styled(text, BOLD))

    def heading(self, text: str) -> None:
        self.say(self._styled(text, CYAN))

    def faint(self, text: str) -> None:
        self.say(self._styled(text, FAINT))

    def good(self, text: str) -> None:
        self.say(self._styled(text, GREEN))

    def bad(self, text: str) -> None:
        self.say(self._styled(text, RED))

    def progress(self, stage: str, detail: str = "") -> None:
        """Replaces the progress line before it; elsewhere than on a terminal a stage is shown once, when it begins."""
        if self._is_live:
            self.write(f"\r{stage}{detail}\033[K")
        elif stage != self._stage:
            self.say(stage)
        self._stage = stage

    def done(self, text: str) -> None:
        """Ends the progress line."""
        if self._is_live:
            self.write("\r\033[K")
        self.say(text)

    def _styled(self, text: str, style: str) -> str:
        return f"\033[{style}m{text}\033[0m" if self._has_colour else text
