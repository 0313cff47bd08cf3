"""`prism-bench serve` against a real server, and `prism-bench kernels` where there is no GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prism_server.bench import cli, kernels
from prism_server.bench.kernel_timing import KernelTiming

SMALL = [
    *("--repeats", "1", "--groups", "2", "--questions", "2", "--pictures", "2", "--picture-size", "96x64"),
    *("--output-tokens", "6", "--decode-tokens", "24", "--context-words", "20", "--streams", "2"),
    *("--concurrencies", "2", "--batches", "2", "--requests", "6", "--zipf", "0.5"),
]
SERVER = ["--set", "model.threads=1", "--set", f"kv.memory_bytes={24 << 20}"]


def test_every_phase_is_measured_on_a_server_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "serve.json", tmp_path / "serve.svg"
    phases = [word for phase in ("a", "b", "c", "d", "load") for word in ("--phase", phase)]
    assert cli.main(["serve", *SERVER, *SMALL, *phases, "--json", str(file), "--plot", str(plot)]) == 0
    kept = json.loads(file.read_text())
    rows: dict[str, dict[str, Any]] = {row["phase"]: row for row in kept["rows"]}
    assert {phase: row["num_requests"] for phase, row in rows.items()} == {"a": 3, "b": 4, "c": 2, "d": 3, "load": 6}
    assert rows["a"]["cold_cached_tokens"] < rows["a"]["hot_cached_tokens"] < rows["a"]["prompt_tokens"]
    requests = {request["phase"]: request for request in kept["requests"]}
    for phase, num_groups in (("a", 1), ("b", 2), ("load", 2)):
        assert rows[phase]["cold_ttft_ms"] > 0 < rows[phase]["hot_ttft_ms"]
        # Of questions about one group that are sent at once, any may come first; the others find what it has computed.
        cached = sorted(requests[phase]["cached_tokens"])
        assert cached[num_groups - 1] < cached[num_groups]
    assert rows["c"]["tpot_ms"] > 0
    assert rows["d"]["cold_ttft_ms"] > 0
    assert [request["tokens"] for request in kept["requests"]] == [[6] * 3, [6] * 4, [24] * 2, [24, 24, 16], [6] * 6]
    assert kept["spawn_to_first_token_s"]["median"] > 0
    assert kept["command"].startswith("prism-bench serve --set model.threads=1")
    assert {"torch", "prism-server"} <= kept["environment"]["packages"].keys()
    assert plot.read_text().count("<polyline") == 2 * 7  # a, b and load have two kinds, d has one
    assert "spawn to first token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["serve", "--phase", "e"], "'e'"),
        (["serve", "--picture-size", "448"], "448"),
        (["serve", "--rate", "0"], "positive"),
        (["serve", "--batches", "1,x"], "'x'"),
        (["serve", "--body", "[]"], "--body"),
        (["serve", "--phase", "start", "--base-url", "http://127.0.0.1:9"], "--base-url"),
        (["kernels", "--only", "none"], "none"),
        (["router", "--streams", "0"], "'0'"),
        (["placement", "--pods", "-1"], "--pods"),
        (["gate", "--seconds", "0"], "positive"),
    ],
)
def test_a_wrong_argument_of_a_load_is_one_clear_line_and_exit_code_2(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_help_names_every_command_and_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    listed = capsys.readouterr().out.partition("commands:\n")[2].partition("\n\n")[0]
    commands = [line.split()[0] for line in listed.splitlines() if line.split()]
    assert {"accuracy", "serve", "kernels", "router", "placement", "gate", "draw"} == set(commands)
    for command in commands:
        with pytest.raises(SystemExit, match="0"):
            cli.main([command, "--help"])
        assert f"prism-bench {command}" in capsys.readouterr().out


def test_without_a_gpu_no_kernel_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["kernels"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "NVIDIA GPU" in line


class Timing:
    """A timing module."""

    @staticmethod
    def measure(seconds: float) -> list[KernelTiming]:
        return [KernelTiming("store", "8 rows", seconds, 0, 0.0, "", 0.0)]


def test_a_part_that_fails_costs_the_other_timings_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.json"

    def imported(name: str) -> type[Timing]:
        if name == "broken":
            assert json.loads(file.read_text())["timings"].keys() == {"first"}  # kept before the next one begins
            raise ImportError("no such kernel")
        return Timing

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "measured_bandwidth", lambda: 4e12)
    monkeypatch.setattr(kernels, "timing_modules", lambda: {name: name for name in ("first", "broken", "last")})
    monkeypatch.setattr(kernels, "importlib", SimpleNamespace(import_module=imported))
    assert cli.main(["kernels", "--seconds", "3", "--json", str(file)]) == 1
    kept = json.loads(file.read_text())
    assert {name: timings[0]["us"] for name, timings in kept["timings"].items()} == {"first": 3.0, "last": 3.0}
    assert kept["failed"] == {"broken": "ImportError: no such kernel"}
    assert "no such kernel" in capsys.readouterr().err


def test_every_timing_module_can_measure() -> None:
    assert kernels.timing_modules().keys() >= {"attention", "linear", "small"}
    for name in kernels.timing_modules().values():
        assert callable(importlib.import_module(name).measure), name


def test_kernels_are_shown_beside_their_twins() -> None:
    timings = [
        KernelTiming("norm_linear", "1 x 4096 -> 6144", 12.5, 50_331_648, 0.98, "cuBLAS", 25.0),
        KernelTiming("select", "64 rows", 8.0, 0, 0.0, "", 0.0),
    ]
    lines = [line.split() for line in kernels.table_of(timings).splitlines()]
    assert lines[1][-6:] == ["12.5", "98", "%", "cuBLAS", "25.0", "2.00"]
    assert lines[2][-1] == "8.0"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_product_is_timed_by_graph_and_bounded_by_the_measured_bandwidth() -> None:
    from prism_server.bench.kernel_timing import graph_us, measured_bandwidth

    matrices = [torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(6)]
    vector = torch.randn(8192, dtype=torch.bfloat16, device="cuda")
    us = graph_us([lambda matrix=matrix: matrix.mv(vector) for matrix in matrices])  # type: ignore[misc]
    timing = KernelTiming.of("mv", "8192 x 8192", us, matrices[0].nbytes, "itself", us)
    assert 0.2 < timing.bandwidth_fraction < 1.2
    assert measured_bandwidth() > 1e11
    assert timing.speedup == 1
