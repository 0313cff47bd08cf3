"""The dashboard, and the page for endpoint pickers, ask for series that engines, routers and the operator have."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass

import yaml
from chart_support import CHART, ROOT, Chart, of_kind
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from prism_operator.metrics import Metrics as OperatorMetrics
from prism_server.engine.messages import EngineStats
from prism_server.media.cache import CacheStats
from prism_server.media.facts_table import FactsStats
from prism_server.media.pipeline import MediaStats
from prism_server.router.discovery_static import StaticDiscovery
from prism_server.router.gauges import read_gauges
from prism_server.router.services import Services
from prism_server.router.settings import DiscoverySettings, RouterSettings
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


def engines_text() -> str:
    """What an engine exposes."""
    metrics = Metrics()
    metrics.watch_engine(IdleEngine())  # type: ignore[arg-type]
    return metrics.expose().decode()


async def routers_text() -> str:
    """What a router exposes that has found no pod yet."""
    settings = RouterSettings(discovery=DiscoverySettings(backends="http://engine"))
    services = Services(settings, StaticDiscovery([]))
    services.metrics.watch(lambda: read_gauges(services))
    try:
        return services.metrics.expose().decode()
    finally:
        services.close()


def exposed() -> set[str]:
    """Names of all samples, `_bucket` and `_total` included."""
    text = engines_text() + asyncio.run(routers_text()) + generate_latest(OperatorMetrics().registry).decode()
    found = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found |= {family.name + suffix for suffix in suffixes}
    return found


def test_every_series_of_the_dashboard_is_exposed() -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    expressions += [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    asked = {name for text in expressions for name in re.findall(r"\bprism_\w+", text)}
    assert len(asked) > 25
    assert asked <= exposed()


def texts() -> dict[str, str]:
    """All of the chart, which helm hands on as it is, and the page about it."""
    files = [ROOT / "docs" / "kubernetes.md", *(path for path in CHART.rglob("*") if path.is_file())]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


def test_every_metric_that_the_chart_or_its_page_names_is_exposed() -> None:
    """In alerts, labels of panels, descriptions of fields: wherever somebody could copy a name from."""
    found = {(page, name) for page, text in texts().items() for name in re.findall(r"\bprism_\w+", text)}
    found = {(page, name) for page, name in found if name not in {"prism_operator", "prism_server"}}
    known = exposed()
    assert len({page for page, _ in found}) >= 2
    assert {(page, name) for page, name in found if not {name, f"{name}_bucket"} & known} == set()


def test_the_alert_of_the_page_asks_for_a_condition_and_reasons_that_exist() -> None:
    page = texts()["docs/kubernetes.md"]
    [alert] = (
        block for block in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "alert:" in block
    )
    expression = yaml.safe_load(alert)["expr"]
    [condition] = re.findall(r'condition="(\w+)"', expression)
    [reasons] = re.findall(r'reason!~"([\w|]+)"', expression)
    section = page.split(f"\n### `{condition}`\n")[1].split("\n### ")[0]
    assert all(f"| `{reason}` | False |" in section for reason in reasons.split("|"))
    grouped = re.findall(r"by \(([\w, ]+)\)", expression)[0].split(", ")
    metrics = OperatorMetrics()
    status = {"conditions": [{"type": condition, "status": "False", "reason": "NoReadyPods"}]}
    metrics.resynced([{"metadata": {"namespace": "n", "name": "d"}, "status": status}])
    labels = dict.fromkeys(grouped, "") | {"deployment_namespace": "n", "deployment": "d"}
    assert labels.keys() == set(grouped)
    labels |= {"condition": condition, "reason": "NoReadyPods"}
    assert metrics.registry.get_sample_value("prism_operator_condition", labels) == 0


def test_an_endpoint_picker_finds_the_gauges_that_the_page_tells_it_of() -> None:
    """The model server protocol of the Gateway API's inference extension."""
    page = (ROOT / "docs" / "kubernetes.md").read_text().split("\n## Gateways\n")[1].split("\n## ")[0]
    gauges = {
        family.name: family for family in text_string_to_metric_families(engines_text()) if family.type == "gauge"
    }
    named = set(re.findall(r"\bprism_\w+", page))
    assert len(named) == 6
    assert named <= gauges.keys()
    [info] = gauges["prism_cache_config_info"].samples
    stats = EngineStats()
    assert info.labels == {"block_size": str(stats.page_tokens), "num_gpu_blocks": str(stats.total_pages)}


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
