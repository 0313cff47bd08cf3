"""docs/kubernetes.md against the operator's code: conditions, reasons, fields, files and commands that it names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import yaml  # type: ignore[import-untyped,unused-ignore]
from pydantic import BaseModel

from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.crd.status import ConditionType
from prism_operator.loader import EXIT_CODES
from prism_operator.metrics import Metrics
from prism_operator.pods import UNSTARTED_REASONS
from prism_operator.rollout import Phase

ROOT = Path(__file__).parents[2]
CODE = ROOT / "operator" / "prism_operator"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
HEADINGS = set(get_args(ConditionType))
STATUSES = {"True", "False", "Unknown"}
REASON = re.compile(r"[A-Z][A-Za-z]+")
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|", re.MULTILINE)
NOT_CONDITIONS = {"api.py"}
"""Its reasons are those of HTTP answers."""


def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(CODE)): ast.parse(path.read_text()) for path in sorted(CODE.rglob("*.py"))}


def reason_positions(modules: dict[str, ast.Module]) -> dict[str, set[int]]:
    """Where a call of each function or class of the operator has its `reason`, by name."""
    positions, bases = defaultdict(set), {}
    for node in (node for tree in modules.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args if argument.arg != "self"]
            if "reason" in names:
                positions[node.name].add(names.index("reason"))
        elif isinstance(node, ast.ClassDef):
            inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
            fields = [ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)]
            names = [argument.arg for argument in inits[0].args.args[1:]] if inits else fields
            if "reason" in names:
                positions[node.name].add(names.index("reason"))
            bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    for name, parents in bases.items():
        for parent in parents:
            positions[name] |= positions.get(parent, set())
    return positions


def reason_expressions(tree: ast.Module, positions: dict[str, set[int]]) -> Iterator[ast.expr]:
    """Every expression of a module that becomes a reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "reason")
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            yield from (node.args[at] for at in positions.get(name, ()) if at < len(node.args))
            is_default = name == "get" and len(node.args) == 2 and getattr(node.args[0], "value", "") == "reason"
            if is_default:
                yield node.args[1]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == "reason":
                    yield node.value
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3 and getattr(node.elts[0], "value", "") in STATUSES:
            yield node.elts[1]
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args.args
            for argument, default in zip(reversed(arguments), reversed(node.args.defaults), strict=False):
                if argument.arg == "reason":
                    yield default


def literals(expression: ast.expr) -> set[str]:
    found = (node.value for node in ast.walk(expression) if isinstance(node, ast.Constant))
    words = {value for value in found if isinstance(value, str) and REASON.fullmatch(value)}
    return words - {"True", "False"} - UNSTARTED_REASONS


def reasons_of_the_code() -> set[str]:
    modules = {name: tree for name, tree in trees().items() if name not in NOT_CONDITIONS}
    positions = reason_positions(modules)
    written = (literals(expression) for tree in modules.values() for expression in reason_expressions(tree, positions))
    return set().union(*written) | {phase.value for phase in Phase} | set(EXIT_CODES)


def verdicts_of_the_code() -> set[tuple[str, str, str]]:
    """(type, reason, status) of each Verdict that is written out."""
    found = set()
    for node in ast.walk(trees()["conditions.py"]):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Verdict":
            first = [argument.value for argument in node.args[:3] if isinstance(argument, ast.Constant)]
            if len(first) == 3:
                found.add((str(first[0]), str(first[2]), str(first[1])))
    return found


def sections() -> dict[str, str]:
    """By the heading of the third level, in the chapter of conditions."""
    chapter = PAGE.split("\n## Conditions and reasons\n")[1].split("\n## ")[0]
    return dict(part.split("\n", 1) for part in chapter.split("\n### ")[1:])


def documented() -> set[tuple[str, str, str]]:
    """(type, reason, status); the words of Kubernetes have no status in their rows."""
    return {(name.strip("`"), *row) for name, text in sections().items() for row in ROW.findall(text)}


def test_every_condition_has_a_section_and_no_other_has() -> None:
    assert set(sections()) == {f"`{name}`" for name in HEADINGS} | {"Any condition"}


def test_every_reason_is_documented_and_none_that_does_not_exist() -> None:
    code, page = reasons_of_the_code(), {reason for _, reason, _ in documented()}
    assert len(code) > 50
    assert code - page == set()
    assert page - code == set()


def test_the_collector_finds_a_reason_wherever_it_is_written() -> None:
    source = """
class Failed(Exception):
    def __init__(self, code, reason): ...
class Worse(Failed): ...
def planned(plan, reason="Default"): ...
def f():
    Worse(1, "Inherited")
    planned(0, reason="ByKeyword" if x else "Otherwise")
    reason = "Assigned"
    body.get("reason", "Fallback")
    return "False", "InTuple", "a sentence"
"""
    tree = ast.parse(source)
    expressions = list(reason_expressions(tree, reason_positions({"m": tree})))
    found = set().union(*map(literals, expressions))
    assert found == {"Inherited", "ByKeyword", "Otherwise", "Assigned", "Fallback", "InTuple", "Default"}


def test_what_a_condition_says_stands_in_its_own_section_with_its_status() -> None:
    assert verdicts_of_the_code() - documented() == set()


def test_every_field_of_the_spec_is_read_somewhere() -> None:
    code = "".join(path.read_text() for path in CODE.rglob("*.py") if path.parent.name != "crd")
    read = set(re.findall(r"\.([a-z]\w*)", code))
    assert [field for field in fields_of(PrismDeploymentSpec) if field.rpartition(".")[2] not in read] == []


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Paths of all fields, deepest included."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}"
        for part in (info.annotation, *get_args(info.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from fields_of(part, f"{prefix}{name}.")


def test_fields_that_are_named_exist() -> None:
    """`group.field` with a group of the spec; the chart's values have groups of their own."""
    groups = {info.alias or name: info for name, info in PrismDeploymentSpec.model_fields.items()}
    of_the_chart = {"image.registry", "image.tag", "image.pullSecrets", "networkPolicy.apiServer"}
    for group, field in re.findall(r"`(?:spec\.)?([a-zA-Z]+)\.([a-zA-Z]+)\b", PAGE):
        if group not in groups or f"{group}.{field}" in of_the_chart:
            continue
        (model,) = (part for part in (groups[group].annotation, *get_args(groups[group].annotation)) if known(part))
        assert field in {info.alias for info in model.model_fields.values()}, f"{group}.{field}"


def test_parts_of_specs_that_are_shown_are_taken() -> None:
    groups = {info.alias for info in PrismDeploymentSpec.model_fields.values()}
    blocks = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
    shown = [block for block in blocks if groups.issuperset(block)]
    assert len(shown) >= 6
    for block in shown:
        PrismDeploymentSpec.parse({"model": {"source": {"demo": {}}}} | block)


def known(part: object) -> bool:
    return hasattr(part, "model_fields")


def test_values_of_the_chart_that_are_named_exist() -> None:
    values = yaml.safe_load((ROOT / "charts" / "prism" / "values.yaml").read_text())
    table = PAGE.split("| value | default | |")[1].split("\n\n")[0]
    named = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[1:] + re.findall(r"--set ([\w.]+)=", PAGE)
    paths = [path.strip("`") for cell in named for path in cell.split(", ")]
    assert len(paths) > 15
    for path in paths:
        inner = values
        for step in path.split("."):
            assert step in inner, path
            inner = inner[step]


def test_files_and_metrics_that_are_named_exist() -> None:
    files = set(re.findall(r"\b(?:examples|charts|images|docs)/[\w./-]*\w\.\w+", PAGE))
    assert len(files) >= 7
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.yaml")} <= files
    metrics = {metric.name.removesuffix("_total") for metric in Metrics().registry.collect()}
    named = {name.removesuffix("_total") for name in re.findall(r"`(prism_operator_\w+)`", PAGE)}
    assert named == {name for name in metrics if name.startswith("prism_operator_")}


def test_links_inside_the_page_lead_somewhere() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) == anchors
