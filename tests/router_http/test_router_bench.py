"""The measurement of the router measures what it says; no speed is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism_server.bench import cli


def test_both_ways_are_measured_and_every_stream_comes_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "router.json"
    assert cli.main(["router", "--rounds", "4", "--streams", "10", "--stream-s", "1", "--json", str(file)]) == 0
    kept = json.loads(file.read_text())
    assert [added["body_bytes"] > 5_000_000 for added in kept["added"]] == [False, True]
    assert [(streams["name"], streams["num_finished"]) for streams in kept["streams"]] == [
        ("direct", 10),
        ("routed", 10),
    ]
    assert kept["plan"]["num_streams"] == 10
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("5 MB, eight pictures", "livez"))
