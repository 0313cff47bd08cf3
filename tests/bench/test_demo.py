"""`make demo`, run as a user runs it, and what makes it fail."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

from prism_server.bench.client import Answer
from prism_server.bench.demo import problems_of
from prism_server.bench.demo_script import NOTHING, script
from prism_server.engine.messages import Timings, Usage


def test_the_demo_shows_what_each_request_cost_and_ends_well() -> None:
    command = [sys.executable, "-m", "prism_server.bench.demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.rstrip().endswith("sooner")]
    assert len(rows) == len(script()) - 1
    assert done.stdout.count("   right\n") == len(script())


def test_a_repeated_question_that_decodes_something_or_a_wrong_answer_fails_the_demo() -> None:
    step = script()[1]
    assert step.cost == NOTHING
    good = Answer(step.turn.answer, "stop", Usage(673, cached_tokens=659), Timings(), (1.0,), 2.0)
    assert problems_of(step, good) == []
    decoded = dataclasses.replace(good, usage=Usage(673, decoded_items=1))
    assert len(problems_of(step, decoded)) == 1
    assert len(problems_of(step, dataclasses.replace(good, text="Nobody"))) == 1
