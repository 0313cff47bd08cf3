"""`prism-plan` as a user runs it."""

from __future__ import annotations

import json

import pytest

from prism_server.capacity.cli import main
from prism_server.demo_model import checkpoint_dir


@pytest.mark.parametrize(
    ("dtype", "tokens", "mib"),
    [("bf16", 28_928, "4,068.0000 MiB"), ("fp8", 28_928, "2,097.5625 MiB"), ("fp8", 56_320, "4,083.7500 MiB")],
)
def test_tokens_of_the_8b_in_mib(capsys: pytest.CaptureFixture[str], dtype: str, tokens: int, mib: str) -> None:
    assert main(["--model", "8b", "--kv-dtype", dtype, "--tokens", str(tokens)]) == 0
    assert mib in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "tokens"), [("bf16", 29_120), ("fp8", 56_448)])
def test_tokens_of_the_8b_in_a_budget_of_4096_mib(capsys: pytest.CaptureFixture[str], dtype: str, tokens: int) -> None:
    assert main(["--model", "8b", "--kv-dtype", dtype, "--kv-memory-mib", "4096", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tokens"], facts["page_tokens"]) == (tokens, 64)


def test_a_token_costs_a_whole_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "65", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 128


@pytest.mark.parametrize(
    ("extra", "copied"),
    [
        ([], True),
        (["--fp8-head", "on", "--weight-dtype", "fp32"], True),
        (["--fp8-head", "off"], False),
        (["--weight-dtype", "fp32"], False),
    ],
)
def test_a_plan_as_json_adds_up(capsys: pytest.CaptureFixture[str], extra: list[str], copied: bool) -> None:
    assert main(["--gpu-memory-gib", "141", "--json", *extra]) == 0
    facts = json.loads(capsys.readouterr().out)
    working = ("activation_bytes", "encoder_bytes", "feature_cache_bytes", "graph_bytes")
    terms = ("weight_bytes", "fp8_head_bytes", *working, "kv_bytes")
    assert sum(facts[term] for term in terms) == facts["usable_bytes"]
    assert facts["fp8_head_bytes"] == (622_937_600 if copied else 0)
    assert facts["pages"] == facts["kv_bytes"] // facts["page_bytes"]
    assert facts["fits"]
    assert facts["suggestions"] == []


def test_a_plan_that_does_not_fit_is_exit_code_1_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu-memory-gib", "24", "--kv-dtype", "bf16"]) == 1
    assert "tensor parallel over 2 such GPUs, not served yet" in capsys.readouterr().out


def test_a_checkpoint_directory_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(checkpoint_dir()), "--tokens", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 6 * 2 * 2 * (128 + 4)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--modl", "8b", "--tokens", "1"], "unknown argument '--modl'; did you mean --model?"),
        (["--model", "9b", "--tokens", "1"], "model '9b' is neither one of"),
        (["--tokens", "many"], "'many' is not a number"),
        (["--tokens", "0"], "must be at least 1"),
        (["--gpu-memory-gib", "nan"], "'nan' must be"),
        (["--gpu-memory-gib", "80", "--fp8-head", "maybe"], "invalid choice: 'maybe'"),
        (["--tokens", "1", "--tensor-parallel", "3"], "must divide its 8 KV heads"),
        (["--tokens", "1", "--kv-dtype", "fp4"], "invalid choice: 'fp4'"),
        (["--tokens", "1", "--kv-memory-mib", "4096"], "not allowed with"),
        ([], "is required"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], reason: str
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("prism-plan: error: ")
    assert reason in error
    assert error.count("\n") == 1
