"""What is written to stderr, and about which request."""

from __future__ import annotations

import subprocess
import sys

import pytest

SPEAKERS = """
import logging, sys
from prism_server.http.logs import REQUEST_ID, log_to_stderr
log_to_stderr(sys.argv[1])
def speak():
    for name in ("prism_server.serving.anything", "uvicorn.error"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(name).log(level, "%s of %s", logging.getLevelName(level).lower(), name.split(".")[0])
speak()
REQUEST_ID.set("mine-1")
logging.getLogger("prism_server").error("about a request")
"""
FORGER = """
import logging
from prism_server.http.logs import log_to_stderr
log_to_stderr("info")
try:
    raise ValueError("it said:\\n2026-01-01 00:00:00,000 ERROR prism_server: forged \\x1b[31m\\r\\x9b\\u2028caf\u00e9")
except ValueError:
    logging.getLogger("prism_server").exception("one\\ntwo")
"""


def written(level: str, speakers: str = SPEAKERS) -> list[str]:
    command = [sys.executable, "-X", "utf8", "-c", speakers, level]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("level", "ours", "others"),
    [
        ("debug", ["debug", "info", "warning", "error"], ["warning", "error"]),
        ("info", ["info", "warning", "error"], ["warning", "error"]),
        ("error", ["error"], ["error"]),
    ],
)
def test_the_level_is_for_our_own_lines_and_libraries_speak_from_warnings_on(
    level: str, ours: list[str], others: list[str]
) -> None:
    *lines, _ = written(level)
    assert [line.split(": ", 1)[1] for line in lines] == [
        *(f"{word} of prism_server" for word in ours),
        *(f"{word} of uvicorn" for word in others),
    ]


def test_a_line_about_a_request_has_its_id_and_others_have_none() -> None:
    *others, last = written("info")
    assert last.endswith(" ERROR prism_server: [mine-1] about a request")
    assert not any("[" in line for line in others)


def test_nothing_within_a_record_looks_like_another_one_or_speaks_to_a_terminal() -> None:
    first, *further = written("info", FORGER)
    assert first.endswith(" ERROR prism_server: one")
    assert further[0] == "    two"
    assert all(line.startswith("    ") for line in further)
    assert further[-1].endswith(r"forged \x1b[31m\r\x9b\u2028café")
