"""Exact-match counts of several runs over the same questions, and whether the runs agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from prism_server.bench.questions import Question
from prism_server.bench.report import table

REFERENCE = "reference"
ALLOWED_POINTS = 1.0
"""How far two runs may lie apart, in percentage points of all questions."""


@dataclass(frozen=True, slots=True)
class Run:
    """One system's answers to all questions, in order. `costs` are sums of the usage counts."""

    name: str
    answers: tuple[str, ...] = field(repr=False)
    seconds: float
    options: dict[str, str] = field(default_factory=dict)
    costs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scores:
    """Runs side by side. An answer is right when it equals the expected text, character for character."""

    questions: Sequence[Question]
    runs: Sequence[Run]

    def points(self, run: Run) -> float:
        return 100.0 * self._right(run, range(len(self.questions))) / len(self.questions)

    def disagreements(self) -> list[str]:
        """A line for each pair of runs that lie further apart than they may."""
        pairs = [(a, b, abs(self.points(a) - self.points(b))) for a, b in combinations(self.runs, 2)]
        return [
            f"{a.name} and {b.name} differ by {apart:.2f} points" for a, b, apart in pairs if apart > ALLOWED_POINTS
        ]

    def tables(self) -> str:
        """By layout, by task and in all; beside the reference, how far from it each run is."""
        names = [run.name for run in self.runs]
        by_layout = table(["layout", "asked", *names], self._rows(lambda question: question.layout))
        by_task = table(["task", "asked", *names], self._rows(lambda question: question.task))
        return "\n\n".join([by_layout, by_task, table(["all", "asked", *names], self._summary())])

    def as_json(self) -> dict[str, Any]:
        return {
            "asked": len(self.questions),
            "runs": [self._run_json(run) for run in self.runs],
            "wrong_somewhere": [
                {
                    "layout": question.layout,
                    "task": question.task,
                    "question": question.text,
                    "expected": question.expected,
                    "answers": {run.name: run.answers[i] for run in self.runs},
                }
                for i, question in enumerate(self.questions)
                if any(run.answers[i] != question.expected for run in self.runs)
            ],
        }

    def _run_json(self, run: Run) -> dict[str, Any]:
        return {
            "name": run.name,
            "options": run.options,
            "right": self._right(run, range(len(self.questions))),
            "points": round(self.points(run), 3),
            "seconds": round(run.seconds, 1),
            "costs": run.costs,
            "right_by_layout": self._counts(run, lambda question: question.layout),
            "right_by_task": self._counts(run, lambda question: question.task),
        }

    def _summary(self) -> list[list[object]]:
        asked = len(self.questions)
        rows: list[list[object]] = [
            ["right", asked, *(self._right(run, range(asked)) for run in self.runs)],
            ["percent", "", *(f"{self.points(run):.2f}" for run in self.runs)],
        ]
        reference = next((run for run in self.runs if run.name == REFERENCE), None)
        if reference is not None:
            apart = [self.points(run) - self.points(reference) for run in self.runs]
            rows.append(["points from the reference", "", *(f"{points:+.2f}" for points in apart)])
            same = [sum(map(str.__eq__, run.answers, reference.answers)) for run in self.runs]
            rows.append(["same text as the reference", "", *same])
        rows.append(["seconds", "", *(f"{run.seconds:.0f}" for run in self.runs)])
        for name in ("decoded_items", "encoded_items", "prefilled_media_tokens", "cached_media_tokens"):
            rows.append([name.replace("_", " "), "", *(run.costs.get(name, "") for run in self.runs)])
        return rows

    def _rows(self, group_of: Callable[[Question], str]) -> list[list[object]]:
        groups = self._groups(group_of)
        return [
            [group, len(members), *(self._right(run, members) for run in self.runs)]
            for group, members in groups.items()
        ]

    def _counts(self, run: Run, group_of: Callable[[Question], str]) -> dict[str, int]:
        return {group: self._right(run, members) for group, members in self._groups(group_of).items()}

    def _groups(self, group_of: Callable[[Question], str]) -> dict[str, list[int]]:
        """Indices of the questions of each group, groups in order of first appearance."""
        groups: dict[str, list[int]] = {}
        for index, question in enumerate(self.questions):
            groups.setdefault(group_of(question), []).append(index)
        return groups

    def _right(self, run: Run, indices: Iterable[int]) -> int:
        return sum(run.answers[i] == self.questions[i].expected for i in indices)
