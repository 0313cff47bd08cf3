"""The house itself: which way imports point, what stays free of torch, how long a file may be, which scripts exist."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "prism_server"

ORDER = (
    "errors",
    "cli_support",
    "http",
    "identity",
    "checkpoint_files",
    "capacity",
    "settings",
    "settings_cli",
    "page",
    "media",
    "router",
    "prompt",
    "kv",
    "ops",
    "model",
    "engine",
    "demo_model",
    "serving",
    "bench",
)
"""A part imports only what stands before it."""

MAY_NOT_IMPORT_TORCH = ORDER[: ORDER.index("prompt")]
MAX_LINES = 400


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The package or top-level module that a file belongs to; `prism_server` for the root `__init__`."""
    inside = path.relative_to(PACKAGE).parts
    return PACKAGE.name if inside == ("__init__.py",) else inside[0].removesuffix(".py")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions too, with relative imports made absolute."""
    package = module_name(path).split(".")[: None if path.name == "__init__.py" else -1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_parts(path: Path) -> set[str]:
    """Parts of Prism that a file imports; other names of the root package (`__version__`) aside."""
    names = (module.split(".") for module in imported_modules(path))
    return {name[1] for name in names if name[0] == PACKAGE.name and len(name) > 1} & {
        part_of(file) for file in sources()
    }


def run_python(*arguments: str) -> str:
    """Output of a fresh interpreter started in the repository root."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_part_has_its_place_in_the_order() -> None:
    assert {part_of(path) for path in sources()} - {PACKAGE.name} <= set(ORDER)


def test_a_package_imports_only_what_stands_above_it() -> None:
    wrong = {}
    for path in sources():
        part = part_of(path)
        allowed = set() if part == PACKAGE.name else set(ORDER[: ORDER.index(part) + 1])
        if upwards := imported_parts(path) - allowed:
            wrong[module_name(path)] = upwards
    assert not wrong


def test_data_and_settings_import_without_torch() -> None:
    light = [module_name(path) for path in sources() if part_of(path) in MAY_NOT_IMPORT_TORCH]
    assert "prism_server.identity.digest" in light
    script = f"import importlib, sys; [importlib.import_module(m) for m in {light!r}]; print('torch' in sys.modules)"
    assert run_python("-c", script) == "False"


def test_the_demo_models_generator_imports_without_torch() -> None:
    script = "import sys, prism_server.demo_model.samples; print('torch' in sys.modules)"
    assert run_python("-c", script) == "False"


def test_pythons_own_operator_wins_from_the_repository_root() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    expected = run_python("-I", "-c", "import operator; print(operator.__file__)")
    assert run_python("-c", "import sys, operator; assert '' in sys.path; print(operator.__file__)") == expected


def test_pythons_own_http_wins_over_the_folder_of_tests_for_ours() -> None:
    expected = run_python("-I", "-c", "import http; print(http.__file__)")
    assert run_python("-c", "import sys; sys.path.insert(0, 'tests'); import http; print(http.__file__)") == expected


def test_the_operator_package_is_importable_under_its_own_name() -> None:
    found = Path(run_python("-c", "import prism_operator; print(prism_operator.__file__)"))
    assert found == ROOT / "operator" / "prism_operator" / "__init__.py"


def test_a_file_is_short_enough_to_be_read() -> None:
    files = [file for folder in (PACKAGE, ROOT / "operator", ROOT / "e2e") for file in folder.rglob("*.py")]
    lines = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def console_scripts() -> dict[str, str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        scripts: dict[str, str] = tomllib.load(file)["project"]["scripts"]
    return scripts


@pytest.mark.parametrize("name", console_scripts())
def test_a_console_script_resolves_to_a_function(name: str) -> None:
    target = importlib.metadata.EntryPoint(name, console_scripts()[name], "console_scripts").load()
    assert callable(target)


def test_the_bundled_checkpoint_lies_inside_the_package() -> None:
    """Package data is what a wheel carries; a checkpoint outside it would be missing after an installation."""
    from prism_server.demo_model import checkpoint_dir

    assert checkpoint_dir().is_relative_to(PACKAGE)
    assert (checkpoint_dir() / "model.safetensors.index.json").is_file()
