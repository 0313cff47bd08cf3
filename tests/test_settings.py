"""Where settings come from, which source wins, and what every mistake says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prism_server.capacity.models import KNOWN_MODELS
from prism_server.capacity.plan import plan_pages
from prism_server.capacity.units import GIB
from prism_server.errors import BadRequest, StartupError
from prism_server.settings import ServerSettings
from prism_server.settings_cli import load_settings, options

CONFIGS = Path(__file__).parents[1] / "configs"


def write_config(tmp_path: Path, content: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def refusal(argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(StartupError) as raised:
        load_settings(argv, environ or {})
    assert "\n" not in raised.value.reason
    return raised.value.reason


def test_without_any_source_the_defaults_hold() -> None:
    assert load_settings([], {}) == ServerSettings()


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"kv": {"dtype": "fp32", "page_tokens": 16, "host_bytes": 7}})
    environ = {"PRISM_KV__DTYPE": "bf16", "PRISM_KV__PAGE_TOKENS": "32"}
    kv = load_settings(["--config", config, "--kv.dtype", "fp8"], environ).kv
    assert (kv.dtype, kv.page_tokens, kv.host_bytes, kv.memory_fraction) == ("fp8", 32, 7, 0.85)


def test_sources_of_one_group_are_merged_option_by_option(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"engine": {"overlap": False}})
    engine = load_settings(["--config", config, "--engine.chunk_tokens=16"], {"PRISM_ENGINE__AGEING_MS": "5"}).engine
    assert (engine.overlap, engine.chunk_tokens, engine.ageing_ms) == (False, 16, 5)


def test_model_is_short_for_model_path() -> None:
    assert load_settings(["--model", "/models/x"], {}).model.path == "/models/x"


def test_load_format_has_a_short_name() -> None:
    assert load_settings(["--load-format", "random"], {}).model.load_format == "random"
    assert "load_format 'gguf': must be 'safetensors' or 'random'" in refusal(["--load-format", "gguf"])


def test_values_are_converted_by_the_options_type() -> None:
    argv = ["--kv.prefix_cache", "false", "--engine.step_budget_ms", "2.5", "--http.api_keys_file", __file__]
    settings = load_settings(argv, {})
    assert settings.kv.prefix_cache is False
    assert settings.engine.step_budget_ms == 2.5
    assert settings.http.api_keys_file == Path(__file__)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("auto", "auto"),
        ("on", "on"),
        ("off", "off"),
        (True, "on"),
        (False, "off"),
        ("true", "on"),
        ("false", "off"),
        ("True", "on"),
        ("0", "off"),
        (1, "on"),
    ],
)
def test_a_switch_with_auto_is_set_by_booleans_too(tmp_path: Path, said: bool | int | str, meant: str) -> None:
    config = write_config(tmp_path, {"model": {"fp8_head": said}})
    assert load_settings(["--config", config], {}).model.fp8_head == meant
    assert load_settings([f"--model.fp8_head={said}"], {}).model.fp8_head == meant
    assert load_settings([], {"PRISM_MODEL__FP8_HEAD": str(said)}).model.fp8_head == meant


def test_lists_come_with_commas_or_as_json(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"fetch": {"hosts": ["Example.org"], "ports": [8443]}})
    assert load_settings(["--config", config], {}).fetch.hosts == ("example.org",)
    fetch = load_settings(
        ["--config", config, "--fetch.hosts", "*.a.org, ::0001,*"], {"PRISM_FETCH__PORTS": "80,443"}
    ).fetch
    assert (fetch.hosts, fetch.ports) == (("*.a.org", "::1", "*"), (80, 443))


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["--fetch.hosts", "a.org,https://b.org"],
            ["--fetch.hosts 'a.org,https://b.org'", "'https://b.org' is no host"],
        ),
        (["--fetch.hosts", "*b.org"], ["'*b.org' is no host"]),
        (["--fetch.ports", "443,https"], ["--fetch.ports '443,https'", "valid integer"]),
        (["--fetch.private_networks", "10.0.0.1/8"], ["--fetch.private_networks", "not a valid IPv4 network"]),
        (["--kv.dtyp", "fp8"], ["'--kv.dtyp'", "did you mean --kv.dtype?"]),
        (["--kv.dtype", "fp7"], ["--kv.dtype 'fp7'", "'fp8', 'bf16' or 'fp32'"]),
        (["--kv.dtype"], ["--kv.dtype", "expected one argument"]),
        (["--kv.page_tokens", "0"], ["--kv.page_tokens '0'", "greater than or equal to 1"]),
        (["--kv.page_tokens", "many"], ["--kv.page_tokens 'many'", "valid integer"]),
        (["--model.fp8_head", "maybe"], ["--model.fp8_head 'maybe'", "'auto', 'on' or 'off'"]),
        (["--kv.prefix_cache", "maybe"], ["--kv.prefix_cache 'maybe'", "valid boolean"]),
        (["--kv.memory_fraction", "nan"], ["--kv.memory_fraction 'nan'"]),
        (["--http.request_timeout_s", "inf"], ["--http.request_timeout_s 'inf'", "finite"]),
        (["--http.port", "65536"], ["--http.port '65536'", "less than or equal to 65535"]),
        (["--http.api_keys_file", "/no/keys"], ["--http.api_keys_file '/no/keys'", "must be a file or a directory"]),
        (["--engine.max_step_tokens", "3"], ["engine.max_step_tokens 3", "engine.max_running_sequences 64"]),
        (["--config", "/no/config.json"], ["/no/config.json", "No such file"]),
        (["serve"], ["unknown argument 'serve'"]),
    ],
)
def test_a_mistake_on_the_command_line_names_key_value_and_what_is_allowed(argv: list[str], parts: list[str]) -> None:
    reason = refusal(argv)
    for part in parts:
        assert part in reason


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("{", ["not valid JSON"]),
        ([], ["must hold a JSON object"]),
        ({"kv": {"dtyp": "fp8"}}, ["unknown option kv.dtyp", "did you mean kv.dtype?"]),
        ({"cache": {}}, ["unknown group 'cache'", "model, kv, engine, media, fetch, http"]),
        ({"kv": 3}, ["kv is 3", "must be an object"]),
        ({"kv": {"dtype": 8}}, ["config.json: kv.dtype '8'", "'fp8', 'bf16' or 'fp32'"]),
        ({"model": {"fp8_head": [True]}}, ["config.json: model.fp8_head '[true]'", "'auto', 'on' or 'off'"]),
        ({"model": {"fp8_head": 2}}, ["config.json: model.fp8_head '2'", "'auto', 'on' or 'off'"]),
        ({"kv": {"dtype": None}}, ["kv.dtype 'null'", "'fp8', 'bf16' or 'fp32'"]),
        ({"media": {"max_items": [1]}}, ["media.max_items '[1]'", "valid integer"]),
    ],
)
def test_a_mistake_in_the_file_names_key_value_and_what_is_allowed(
    tmp_path: Path, content: object, parts: list[str]
) -> None:
    reason = refusal(["--config", write_config(tmp_path, content)])
    for part in ["config.json", *parts]:
        assert part in reason


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "not valid JSON" in refusal(["--config", str(tmp_path / "config.json")])


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("PRISM_KV__DTYP", "fp8", ["PRISM_KV__DTYP names no option", "did you mean PRISM_KV__DTYPE?"]),
        ("PRISM_KV", "{}", ["PRISM_KV names no option"]),
        ("PRISM_PORT", "8000", ["PRISM_PORT names no option"]),
        ("PRISM_KV__DTYPE", "fp7", ["PRISM_KV__DTYPE 'fp7'", "'fp8', 'bf16' or 'fp32'"]),
    ],
)
def test_a_mistake_in_the_environment_names_variable_and_value(name: str, value: str, parts: list[str]) -> None:
    reason = refusal([], {name: value})
    for part in parts:
        assert part in reason


def test_what_kubernetes_injects_for_a_service_named_prism_is_no_mistake() -> None:
    links = {
        "PRISM_SERVICE_HOST": "10.0.0.1",
        "PRISM_ROUTER_SERVICE_PORT": "80",
        "PRISM_ROUTER_SERVICE_PORT_HTTP": "80",
        "PRISM_PORT": "tcp://10.0.0.1:80",
        "PRISM_PORT_80_TCP": "tcp://10.0.0.1:80",
        "PRISM_PORT_80_TCP_PROTO": "tcp",
        "PRISM_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings([], links) == ServerSettings()
    assert "PRISM_KV__SERVICE_HOST" in refusal([], {"PRISM_KV__SERVICE_HOST": "x"})


def test_several_mistakes_are_told_at_once() -> None:
    reason = refusal(["--kv.dtype", "fp7", "--http.port", "-1"])
    assert "--kv.dtype" in reason
    assert "--http.port" in reason
    assert "; " in reason


def test_constructing_settings_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRISM_KV__DTYPE", "fp32")
    assert ServerSettings().kv.dtype == "fp8"
    assert load_settings([]).kv.dtype == "fp32"


def test_help_lists_every_option_with_default_description_and_environment_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as done:
        load_settings(["--help"], {})
    assert done.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    every = list(options())
    assert len(every) > 30
    for option in every:
        about = f"{option.field.description} " if option.field.description else ""
        start = f"{option.flag} {option.metavar} {about}[default: "
        assert start in shown
        assert f"; env: {option.env_name}]" in shown[shown.index(start) :].split("--", 2)[1]


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        load_settings(["--version"], {})
    assert done.value.code == 0
    assert capsys.readouterr().out == "prism-serve 0.1.0\n"


def test_the_example_config_loads_and_fits_an_h200() -> None:
    settings = load_settings(["--config", str(CONFIGS / "tp1_fp8.json")], {})
    request = settings.plan_request(KNOWN_MODELS["8b"], gpu_memory_bytes=140 * GIB)
    assert plan_pages(request).num_tokens > 1_000_000


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path) -> None:
    load_settings(["--config", str(path)], {})


SCRIPT = """
import sys
from prism_server.cli_support import console_script
from prism_server.errors import BadRequest, StartupError

@console_script("prism-test")
def main(argv):
    raise {error}

sys.exit(main())
"""


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (StartupError("two\nlines"), 2, "prism-test: error: two lines\n"),
        (BadRequest("no such file", "image"), 2, "prism-test: error: no such file\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_console_script_ends_without_a_traceback(error: BaseException, code: int, stderr: str) -> None:
    script = SCRIPT.format(error=f"{type(error).__name__}(*{getattr(error, 'args', ())!r})")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, stderr)


def test_a_fault_of_prism_keeps_its_traceback() -> None:
    script = SCRIPT.format(error="RuntimeError('bug')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
