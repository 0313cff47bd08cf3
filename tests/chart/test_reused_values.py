"""`helm upgrade --reuse-values`: what an older release had stands in for the chart's own values.yaml."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from chart_support import CHART, Chart, Object

FIRST = Path(__file__).parent / "values_of_first_chart.yaml"
"""All values that the first chart had: one that was added since is not among those that are reused."""


def rendered(chart: Chart, source: Path, given: Object, *arguments: str) -> str:
    return chart.run("template", "prism", str(source), "--namespace", "prism-system", *arguments, values=given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"image": {"registry": "registry.example.com/ml", "tag": "2"}},
        {"images": {"router": {"tag": "3"}}},
        {"scope": "namespace", "crds": {"enabled": False}},
        {"operator": {"replicas": 2}, "metrics": {"monitor": {"enabled": True}, "dashboard": {"enabled": True}}},
    ],
    ids=["nothing", "registry and tag", "a tag alone", "namespaced", "all objects"],
)
def test_a_value_that_the_older_release_did_not_have_is_at_its_default(
    chart: Chart, given: Object, tmp_path: Path
) -> None:
    upgraded = shutil.copytree(CHART, tmp_path / CHART.name)
    shutil.copyfile(FIRST, upgraded / "values.yaml")
    assert rendered(chart, upgraded, given) == rendered(chart, CHART, given, "--values", str(FIRST))
