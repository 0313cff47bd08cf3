"""README.md and docs/ against the code: options, metrics, commands, headers, error codes and links that they name.

docs/kubernetes.md has fields of its own, which tests/operator/test_docs.py knows.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism_server.capacity.cli import main as plan_script
from prism_server.router.settings import RouterSettings
from prism_server.settings import ServerSettings
from prism_server.settings_cli import SettingsSource

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PACKAGES = {"prism_server", "prism_operator"}
CODE = (ROOT / "prism_server", ROOT / "operator" / "prism_operator")
MADE_UP_OF_PARTS = ("media_cache_", "media_facts_", "engine_")
"""Beginnings of engines' metrics whose ends are the fields of a snapshot."""
FIELDS = {"engine.overrides"}
"""Of PrismDeployments, where other pages than docs/kubernetes.md name them."""
FILE_ENDINGS = {"json", "jsonl", "md", "py", "safetensors", "yaml"}


def literals(*files: Path) -> set[str]:
    """Every string and bytes constant of the files, pieces of f-strings included."""
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    values = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value.decode("latin-1") if isinstance(value, bytes) else str(value) for value in values}


def named(pattern: str, *without: str) -> set[tuple[str, str]]:
    """(page, name) of every match of the pattern's group."""
    pages = ((page, text) for page, text in PAGES.items() if page not in without)
    return {(page, name) for page, text in pages for name in re.findall(pattern, text)}


OPTIONS = {option.path for kind in (ServerSettings, RouterSettings) for option in SettingsSource(kind, {}).options()}


def test_options_that_are_named_exist() -> None:
    groups = {option.split(".")[0] for option in OPTIONS}
    found = named(r"(?:`|--)([a-z]+\.[a-z_]+)(?=[`=\s])", "docs/kubernetes.md")
    found = {(page, name) for page, name in found if name.split(".")[0] in groups}
    found = {(page, name) for page, name in found if name.split(".")[1] not in FILE_ENDINGS}
    assert len({name for _, name in found}) > 40
    assert [each for each in found if each[1] not in OPTIONS | FIELDS] == []
    variables = {f"PRISM_{option.replace('.', '__')}".upper() for option in OPTIONS}
    assert [each for each in named(r"\b(PRISM_\w+__\w+)") if each[1] not in variables] == []


def test_metrics_that_are_named_exist() -> None:
    found = {name for _, name in named(r"\b(prism_\w+[a-z])(?!\w|\.|/|-)")} - PACKAGES
    for page, heading, prefix in (("http", "prism_...", "prism_"), ("router", "prism_router_...", "prism_router_")):
        table = PAGES[f"docs/{page}.md"].split(f"| metric (`{heading}`)")[1].split("\n\n")[0]
        rows = "".join(row.split(" | ")[0] for row in table.splitlines()[2:])
        found |= {prefix + name for name in re.findall(r"`([a-z_]+[a-z])(?:\{\w+\})?`", rows)}
    routers, operators = ("metrics.py", "gauges.py"), CODE[1] / "metrics.py"
    parts = {
        "prism_operator_": {name.removeprefix("prism_operator_") for name in literals(operators)},
        "prism_router_": {
            name.removeprefix("_") for name in literals(*(CODE[0] / "router" / name for name in routers))
        },
        "prism_": {name.removeprefix("prism_") for name in literals(CODE[0] / "serving" / "metrics.py")},
    }
    assert len(found) > 70
    for metric in found:
        prefix = next(prefix for prefix in parts if metric.startswith(prefix))
        name = metric.removeprefix(prefix)
        is_there = {name, name.removesuffix("_total")} & parts[prefix] or name.startswith(MADE_UP_OF_PARTS)
        assert is_there, metric


def commands() -> Iterator[tuple[str, str]]:
    """(page, command line) of every console script that a block of a page runs."""
    for page, text in PAGES.items():
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if found := re.match(r"(?:\$ )?(?:\.venv/bin/)?(prism-[\w-]+ .*)", line):
                    yield page, found[1].rstrip("& ")


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_commands_have_the_options_that_they_are_given(
    page: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # servers take SIGTERM over as they start
    script, *words = command.split()
    module, name = SCRIPTS[script].split(":")
    subcommand = words[:1] if script == "prism-bench" else []
    with pytest.raises(SystemExit) as ended:
        getattr(importlib.import_module(module), name)([*subcommand, "--help"])
    assert ended.value.code == 0
    known = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", capsys.readouterr().out))
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    assert given - known == set(), page


def test_the_plan_that_the_readme_shows_is_what_prism_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    [(command, shown)] = re.findall(
        r"^\$ \.venv/bin/prism-plan (.*)\n((?:.+\n)+?)```", PAGES["README.md"], re.MULTILINE
    )
    assert plan_script(command.split()) == 0
    assert capsys.readouterr().out == shown


def test_headers_and_error_codes_that_are_named_exist() -> None:
    code = literals(*(path for folder in CODE for path in folder.rglob("*.py")))
    headers = {name for _, name in named(r"\b(x-[a-z-]+[a-z])\b")}
    table = PAGES["docs/http.md"].split("| `code` |")[1].split("\n\n")[0]
    codes = set(re.findall(r"`([a-z_]+)`", table))
    assert len(headers) >= 5
    assert len(codes) > 12
    assert (headers | codes) - code == set()


def test_links_lead_somewhere() -> None:
    for page, target in named(r"(?:\]\(|srcset=\"|src=\")([^)\s\"]+)[)\"]"):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


def test_files_and_folders_that_are_named_exist() -> None:
    """Those that begin with a folder of the repository, and the table of README.md."""
    tops = "prism_server|operator|charts|images|examples|e2e|configs|docs|tests"
    found = named(rf"(?<![\w/.(-])((?:{tops})/[\w./-]*[\w])")
    rows = re.findall(r"^\| (`.*?) \|", PAGES["README.md"].split("## The repository")[1], re.MULTILINE)
    found |= {("README.md", name) for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(found) > 25
    assert [(page, name) for page, name in found if not (ROOT / name).exists()] == []
