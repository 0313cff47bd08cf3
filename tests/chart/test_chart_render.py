"""What the chart makes of its values."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import pytest
import yaml
from chart_support import CHART, Chart, HelmError, Object, of_kind, only, operator_container, pod_specs, violations

from prism_operator.children import names
from prism_operator.children.policies import router_policy
from prism_operator.cli import parse
from prism_operator.crd.__main__ import crd_yaml
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.deployment import MANAGED_BY, Deployment
from prism_operator.options import OperatorOptions

CLUSTER_KINDS = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
EVERYTHING: Object = {
    "operator": {"replicas": 2, "allowHostPath": True},
    "image": {"registry": "registry.example.com/ml", "pullSecrets": [{"name": "pull"}]},
    "metrics": {"monitor": {"enabled": True}, "dashboard": {"enabled": True}},
}
NAMESPACED: Object = {"scope": "namespace", "crds": {"enabled": False}}


@pytest.mark.parametrize("values", [{}, EVERYTHING, NAMESPACED], ids=["default", "everything", "namespaced"])
def test_helm_lint_has_nothing_to_say(chart: Chart, values: Object) -> None:
    assert "0 chart(s) failed" in chart.run("lint", "--strict", str(CHART), values=values)


@pytest.mark.parametrize("values", [{}, EVERYTHING, NAMESPACED], ids=["default", "everything", "namespaced"])
def test_every_pod_is_restricted(chart: Chart, values: Object) -> None:
    pods = dict(pod_specs(chart.render(values)))
    assert set(pods) == {"Deployment/prism-operator", "Pod/prism-test"}
    assert {name: violations(pod) for name, pod in pods.items()} == {name: [] for name in pods}


def test_the_restricted_check_sees_what_is_wrong(chart: Chart) -> None:
    pod = dict(pod_specs(chart.render()))["Deployment/prism-operator"]
    [container] = pod["containers"]
    assert violations({**pod, "hostNetwork": True}) == ["hostNetwork is set"]
    assert violations({**pod, "volumes": [{"name": "node", "hostPath": {"path": "/"}}]}) == ["volume node: hostPath"]
    assert violations({**pod, "securityContext": {}}) == [
        "container operator: runAsNonRoot",
        "container operator: seccompProfile",
    ]
    bare = {key: value for key, value in container.items() if key != "securityContext"}
    assert violations({**pod, "containers": [bare]}) == [
        f"container operator: {rule}"
        for rule in ("allowPrivilegeEscalation", "capabilities.drop", "readOnlyRootFilesystem")
    ]


def test_the_crd_is_the_generated_one_and_stays_when_the_release_goes(chart: Chart) -> None:
    assert (CHART / "files" / "crd.yaml").read_text() == crd_yaml(), "run: make chart"
    rendered = only(chart.render(), "CustomResourceDefinition")
    generated = yaml.load(crd_yaml(), yaml.CSafeLoader)
    assert rendered["spec"] == generated["spec"]
    assert rendered["metadata"]["name"] == generated["metadata"]["name"]
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_a_further_release_holds_no_crd(chart: Chart) -> None:
    assert of_kind(chart.render({"crds": {"enabled": False}}), "CustomResourceDefinition") == []


def test_a_namespaced_release_is_inside_its_namespace(chart: Chart) -> None:
    objects = chart.render(NAMESPACED, namespace="team-a")
    assert of_kind(objects, *CLUSTER_KINDS) == []
    assert {item["metadata"]["namespace"] for item in objects} == {"team-a"}
    assert "--namespace=team-a" in operator_container(objects)["args"]
    assert not any("nodes" in rule["resources"] for role in of_kind(objects, "Role") for rule in role["rules"])


def test_no_two_releases_share_a_cluster_scoped_name(chart: Chart) -> None:
    places = [("a", "b-c"), ("a-b", "c"), ("a", "c"), ("a-b-c", "prism")]
    owned = [
        {
            (item["kind"], item["metadata"]["name"])
            for item in chart.render({"crds": {"enabled": False}}, release, place)
        }
        & {
            (item["kind"], item["metadata"]["name"])
            for item in of_kind(chart.render({"crds": {"enabled": False}}, release, place), *CLUSTER_KINDS)
        }
        for place, release in places
    ]
    assert all(len(names_of_one) == 4 for names_of_one in owned)
    assert all(not (one & other) for one, other in itertools.combinations(owned, 2))


def test_two_releases_of_one_namespace_share_no_name(chart: Chart) -> None:
    values = {**EVERYTHING, "crds": {"enabled": False}}
    one, other = (
        {(item["kind"], item["metadata"]["name"]) for item in chart.render(values, release, "shared")}
        for release in ("prism", "prism-operator")
    )
    assert one
    assert not one & other


def test_names_fit_with_the_longest_release_name(chart: Chart) -> None:
    for item in chart.render(EVERYTHING, release="r" * 53):
        limit = 63 if item["kind"] in {"Service", "Pod", "Deployment"} else 253
        assert len(item["metadata"]["name"]) <= limit
        assert all(len(value) <= 63 for value in item["metadata"]["labels"].values())


def test_selectors_find_the_pods(chart: Chart) -> None:
    objects = chart.render(EVERYTHING)
    deployment = only(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        only(objects, "Service")["spec"]["selector"],
        only(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        only(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        only(objects, "PodMonitor")["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert not selectors[0].items() <= only(objects, "Pod")["metadata"]["labels"].items()


def test_labels_of_people_cannot_take_a_pod_out_of_its_selector(chart: Chart) -> None:
    objects = chart.render({"operator": {"podLabels": {"app.kubernetes.io/component": "other", "team": "vision"}}})
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "operator"
    assert labels["team"] == "vision"


def test_engines_let_the_operator_in_and_the_operator_may_go_there(chart: Chart) -> None:
    objects = chart.render(release="serving")
    flags = flags_of(objects)
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == flags["operator-name"]
    assert flags["operator-namespace"] == only(objects, "Deployment")["metadata"]["namespace"]
    *_, engines = only(objects, "NetworkPolicy")["spec"]["egress"]
    assert [port["port"] for port in engines["ports"]] == [names.API_PORT, names.ADMIN_PORT]
    assert engines["to"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/managed-by": MANAGED_BY}


def test_every_option_of_the_operator_is_a_flag_of_its_pod(chart: Chart) -> None:
    objects = chart.render({**EVERYTHING, "scope": "namespace"}, namespace="team-a")
    flags = {flag.replace("-", "_") for flag in flags_of(objects)}
    assert flags == {field.name for field in fields(OperatorOptions)} | {"log_level"}
    options, level = parse(operator_container(objects)["args"])
    assert (options.namespace, options.operator_namespace) == ("team-a", "team-a")
    assert options.allow_host_path
    assert level == "INFO"


def test_the_defaults_of_the_chart_are_the_operators_own(chart: Chart) -> None:
    options, _ = parse(operator_container(chart.render())["args"])
    assert options == OperatorOptions()


def test_routers_may_go_to_the_api_server_where_the_operator_may(chart: Chart) -> None:
    values = {"networkPolicy": {"apiServer": {"ports": [8443, 6443], "cidrs": ["10.0.0.1/32", "10.0.0.2/32"]}}}
    options, _ = parse(operator_container(chart.render(values))["args"])
    who = Deployment.from_object(
        {"metadata": {"name": "d", "namespace": "n", "uid": "u"}, "spec": {"model": {"source": {"demo": {}}}}}
    )
    _, routers, _ = router_policy(who, options)["spec"]["egress"]
    _, operator, _ = only(chart.render(values), "NetworkPolicy")["spec"]["egress"]
    assert routers == operator


def test_ports_of_the_pod_are_those_of_the_flags(chart: Chart) -> None:
    container = operator_container(chart.render())
    options, _ = parse(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"metrics": options.metrics_port, "health": options.health_port}
    ingress = only(chart.render(), "NetworkPolicy")["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in ingress] == list(ports.values())
    assert {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {"health"}


def test_one_operator_hands_over_to_the_next_without_a_gap(chart: Chart) -> None:
    spec = only(chart.render(), "Deployment")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    with pytest.raises(HelmError, match="retrySeconds < renewDeadlineSeconds < durationSeconds"):
        chart.render({"operator": {"lease": {"renewDeadlineSeconds": 15}}})


def test_images_are_the_values_alone(chart: Chart) -> None:
    digest = "sha256:" + "0123456789abcdef" * 4
    values = {
        "image": {"registry": "registry.example.com/ml/", "tag": "7"},
        "images": {
            "operator": {"repository": "op", "digest": digest},
            "server": {"repository": "srv", "tag": "8"},
            "serverCPU": {"repository": "cpu"},
            "router": {"repository": "rtr", "tag": "9"},
        },
    }
    objects = chart.render(values)
    flags = flags_of(objects)
    operator = f"registry.example.com/ml/op@{digest}"
    assert flags["engine-image"] == "registry.example.com/ml/srv:8"
    assert flags["cpu-image"] == "registry.example.com/ml/cpu:7"
    assert flags["router-image"] == "registry.example.com/ml/rtr:9"
    assert flags["loader-image"] == operator
    assert {container["image"] for _, pod in pod_specs(objects) for container in pod["containers"]} == {operator}


@pytest.mark.parametrize(("kind", "key"), [("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints")])
def test_a_monitor_scrapes_the_metrics_port(chart: Chart, kind: str, key: str) -> None:
    objects = chart.render({"metrics": {"monitor": {"enabled": True, "kind": kind, "labels": {"release": "kps"}}}})
    monitor = only(objects, kind)
    assert monitor["metadata"]["labels"]["release"] == "kps"
    assert monitor["spec"][key] == [{"port": "metrics", "path": "/metrics", "interval": "30s"}]
    assert any(port["name"] == "metrics" for port in operator_container(objects)["ports"])


def test_the_sample_of_the_notes_and_of_the_check_are_valid(chart: Chart) -> None:
    values = {"operator": {"class": "blue"}}
    notes = chart.run("install", "prism", str(CHART), "--dry-run=client", "--namespace", "x", values=values)
    sample = yaml.safe_load(notes.split("<<EOF\n")[1].split("  EOF")[0])
    assert PrismDeploymentSpec.parse(sample["spec"]).operator_class == "blue"
    assert '"model": {"source": {"demo": {}}}' in (CHART / "files" / "check_release.py").read_text()
    [check] = only(chart.render(), "Pod")["spec"]["containers"]
    compile(check["args"][0], "check_release.py", "exec")


def flags_of(objects: list[Object]) -> dict[str, Any]:
    """Flag to value; a flag without a value is True."""
    flags: dict[str, Any] = {}
    for argument in operator_container(objects)["args"]:
        name, equals, value = argument.removeprefix("--").partition("=")
        flags[name] = value if equals else True
    return flags
