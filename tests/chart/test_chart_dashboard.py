"""The dashboard asks for series that the engine server and the operator have."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import yaml
from chart_support import CHART, Chart, of_kind
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from prism_operator.metrics import Metrics as OperatorMetrics
from prism_server.engine.messages import EngineStats
from prism_server.media.cache import CacheStats
from prism_server.media.facts_table import FactsStats
from prism_server.media.pipeline import MediaStats
from prism_server.serving.metrics import Metrics

DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())


@dataclass(frozen=True)
class IdleMedia:
    def stats(self) -> MediaStats:
        return MediaStats(CacheStats(*[0] * 10), FactsStats(*[0] * 4))


@dataclass(frozen=True)
class IdleEngine:
    """An engine's snapshot without an engine, which would take torch and weights."""

    media: IdleMedia = IdleMedia()

    def stats(self) -> EngineStats:
        return EngineStats()


def exposed() -> set[str]:
    """Names of all samples, `_bucket` and `_total` included."""
    metrics = Metrics()
    metrics.watch_engine(IdleEngine())  # type: ignore[arg-type]
    text = metrics.expose() + generate_latest(OperatorMetrics().registry)
    found = set()
    for family in text_string_to_metric_families(text.decode()):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found |= {family.name + suffix for suffix in suffixes}
    return found


def test_every_series_of_the_dashboard_is_exposed() -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    expressions += [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    asked = {name for text in expressions for name in re.findall(r"\bprism_\w+", text)}
    assert len(asked) > 25
    assert asked <= exposed()


def test_panels_are_apart_and_narrowed_to_the_chosen_pods() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    for panel in panels:
        for target in panel.get("targets", ()):
            of_engines = re.findall(r"\bprism_(?!operator_)", target["expr"])
            assert len(of_engines) == target["expr"].count('namespace=~"$namespace",pod=~"$pod"')


def test_the_config_map_holds_the_dashboard_as_it_is(chart: Chart) -> None:
    objects = chart.render({"metrics": {"dashboard": {"enabled": True, "annotations": {"grafana_folder": "Prism"}}}})
    [item] = of_kind(objects, "ConfigMap")
    assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert item["metadata"]["annotations"] == {"grafana_folder": "Prism"}
    assert yaml.safe_load(item["data"]["prism.json"]) == DASHBOARD
