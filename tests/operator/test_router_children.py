"""What holds for routers and what belongs to them, whatever the spec."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest
from deployments import DEMO, HUB, deployment, merged
from test_children_golden import SPECS

from prism_operator.children import OPTIONAL_APIS, children, config, names, versions
from prism_operator.deployment import TEMPLATE_VERSIONS, Deployment
from prism_operator.options import OperatorOptions
from prism_operator.refused import Refused
from prism_server.router.settings import ROUTER, RouterSettings

OPTIONS = OperatorOptions(allow_host_path=True)
NEWEST = TEMPLATE_VERSIONS[-1]
Object = dict[str, Any]


def made(spec: Object, kind: str, suffix: str = "router", options: OperatorOptions = OPTIONS) -> Object:
    objects = children(deployment(spec), options, NEWEST, OPTIONAL_APIS)
    name = f"contracts-{suffix}" if suffix else "contracts"
    [found] = [body for body in objects if (body["kind"], body["metadata"]["name"]) == (kind, name)]
    return found


def pod(spec: Object) -> Object:
    found: Object = made(spec, "Deployment")["spec"]["template"]
    return found


def container(spec: Object) -> Object:
    [only] = pod(spec)["spec"]["containers"]
    found: Object = only
    return found


def settings(spec: Object) -> RouterSettings:
    """As `prism-router` reads its command line, but for the token, which is in the pod only."""
    parser = argparse.ArgumentParser()
    ROUTER.add_arguments(parser)
    flags = [flag for flag in container(spec)["args"] if not flag.startswith("--http.admin_token_file=")]
    return ROUTER.settings_from(parser.parse_args(flags), {})


@pytest.mark.parametrize("name", SPECS)
def test_the_router_understands_its_flags(name: str) -> None:
    found = settings(SPECS[name])
    ports = {entry["name"]: entry["containerPort"] for entry in container(SPECS[name])["ports"]}
    assert (found.http.port, found.http.admin_port) == (ports["api"], ports["admin"])
    assert found.discovery.service == made(SPECS[name], "Service", "engine")["metadata"]["name"]


def test_the_router_takes_every_body_that_an_engine_takes() -> None:
    large = merged(DEMO, {"media": {"maxItemSize": "500Mi"}})
    told = merged(DEMO, {"engine": {"overrides": {"http": {"max_body_bytes": 1 << 29}}}})
    for spec in (DEMO, large, told):
        assert settings(spec).http.max_body_bytes == config.settings_of(deployment(spec).spec).http.max_body_bytes


def test_a_router_goes_later_than_an_engine_that_was_told_at_the_same_time() -> None:
    spec = merged(DEMO, {"drain": {"propagationSeconds": 7, "streamSeconds": 700}})
    engine = made(spec, "StatefulSet", "engine")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    router = pod(spec)["spec"]["terminationGracePeriodSeconds"]
    http = settings(spec).http
    assert router == engine + 15
    assert engine <= http.drain_propagation_s + http.drain_timeout_s < router


def test_a_router_is_not_the_first_process_so_that_one_that_starts_can_be_told_to_go() -> None:
    assert pod(DEMO)["spec"]["shareProcessNamespace"] is True


def test_the_router_waits_for_an_engines_own_deadline() -> None:
    spec = merged(DEMO, {"engine": {"requestTimeoutSeconds": 90}})
    assert settings(spec).upstream.header_timeout_s > 90


def test_a_new_router_is_ready_before_an_old_one_goes_and_one_may_be_evicted_at_a_time() -> None:
    strategy = made(DEMO, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxUnavailable": 0, "maxSurge": 1}
    budget = made(DEMO, "PodDisruptionBudget")["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert budget["selector"]["matchLabels"].items() <= pod(DEMO)["metadata"]["labels"].items()
    [spread] = pod(DEMO)["spec"]["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    assert spread["labelSelector"]["matchLabels"].items() <= pod(DEMO)["metadata"]["labels"].items()


def test_the_users_service_leads_to_the_routers_api_port_and_the_headless_one_to_engines() -> None:
    service, headless = made(DEMO, "Service", ""), made(DEMO, "Service", "engine")
    [port] = service["spec"]["ports"]
    named = {entry["name"]: entry["containerPort"] for entry in container(DEMO)["ports"]}
    assert named[port["targetPort"]] == 8000
    assert service["spec"]["selector"].items() <= pod(DEMO)["metadata"]["labels"].items()
    engines = made(DEMO, "StatefulSet", "engine")["spec"]["template"]["metadata"]["labels"]
    assert headless["spec"]["publishNotReadyAddresses"]
    assert headless["spec"]["selector"].items() <= engines.items()
    assert not headless["spec"]["selector"].items() <= pod(DEMO)["metadata"]["labels"].items()


def test_a_router_may_see_endpoint_slices_of_its_namespace_and_nothing_else() -> None:
    role, binding = made(DEMO, "Role"), made(DEMO, "RoleBinding")
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = made(DEMO, "ServiceAccount")["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "team"}]
    assert pod(DEMO)["spec"]["serviceAccountName"] == account
    assert not [body for body in children(deployment(DEMO), OPTIONS, NEWEST) if body["kind"].startswith("Cluster")]


def test_routers_and_engines_hold_the_same_token() -> None:
    secrets = [
        volume["secret"]["secretName"]
        for template in (pod(DEMO), made(DEMO, "StatefulSet", "engine")["spec"]["template"])
        for volume in template["spec"]["volumes"]
        if volume["name"] == "admin-token"
    ]
    assert secrets == [names.admin_token(deployment(DEMO))] * 2
    assert container(DEMO)["volumeMounts"][0]["readOnly"]
    assert container(DEMO)["securityContext"]["readOnlyRootFilesystem"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"upstream": {"max_trys": 1}},
            r"router\.overrides\.upstream\.max_trys: no such option; there are connect_time",
        ),
        ({"uptream": {}}, "uptream: no such option; there are http, discovery"),
        ({"upstream": 3}, "upstream must be an object"),
        ({"upstream": {"max_tries": 0}}, "max_tries: must be greater than"),
        ({"http": {"drain_timeout_s": 3}}, r"set spec\.drain\.streamSeconds instead"),
        ({"http": {"port": 80}}, "ports and probes depend on it"),
        ({"discovery": {"backends": "http://x"}}, "ports and probes depend on it"),
    ],
)
def test_a_wrong_override_is_refused_with_its_place(overrides: Object, says: str) -> None:
    with pytest.raises(Refused, match=says) as refused:
        made(merged(DEMO, {"router": {"overrides": overrides}}), "Deployment")
    assert refused.value.reason == "InvalidSettings"


def test_overrides_for_another_version_pass_unchecked() -> None:
    spec = merged(DEMO, {"image": {"version": "9.9.9"}, "router": {"overrides": {"upstream": {"not_yet": True}}}})
    assert "--upstream.not_yet=true" in container(spec)["args"]


def test_bodies_have_half_of_a_memory_limit_and_a_limit_that_holds_none_is_refused() -> None:
    def limited(memory: str) -> Object:
        return merged(DEMO, {"router": {"podTemplate": {"resources": {"limits": {"memory": memory}}}}})

    assert settings(limited("1Gi")).http.max_buffered_bytes == 1 << 29
    with pytest.raises(Refused, match=r"router\.podTemplate\.resources: the memory limit leaves 33,554,432") as refused:
        container(limited("64Mi"))
    assert refused.value.reason == "InvalidResources"
    with pytest.raises(Refused, match=r"router\.podTemplate\.resources: memory"):
        container(limited("much"))


def test_a_memory_request_stands_where_the_spec_has_none() -> None:
    assert container(DEMO)["resources"] == {"requests": {"memory": "256Mi"}}
    asked = {"router": {"podTemplate": {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}}}
    assert container(merged(DEMO, asked))["resources"]["requests"] == {"cpu": "1", "memory": "1Gi"}


def test_routers_pull_with_the_engines_credentials_unless_they_have_their_own() -> None:
    spec = merged(DEMO, {"podTemplate": {"imagePullSecrets": ["a"]}})
    assert pod(spec)["spec"]["imagePullSecrets"] == [{"name": "a"}]
    own = merged(spec, {"router": {"podTemplate": {"imagePullSecrets": ["b"]}}})
    assert pod(own)["spec"]["imagePullSecrets"] == [{"name": "b"}]


CALLER = {"podSelector": {"matchLabels": {"app": "web"}}}
ROUTERS = {
    "podSelector": {"matchLabels": {"prism-infer.io/deployment": "contracts", "app.kubernetes.io/component": "router"}}
}
POOL = {"gateway": {"inferencePool": {"endpointPickerRef": {"name": "picker"}}}}


def peers(spec: Object, part: str, port: int) -> list[Object]:
    rules = made(spec, "NetworkPolicy", part)["spec"]["ingress"]
    [found] = [rule.get("from", ["everybody"]) for rule in rules if rule["ports"][0]["port"] == port]
    peers: list[Object] = found
    return peers


def test_users_reach_routers_and_routers_reach_engines() -> None:
    spec = merged(DEMO, {"networkPolicy": {"ingressFrom": [CALLER]}})
    assert peers(spec, "router", 8000) == [CALLER]
    api, operator = peers(spec, "engine", 8000)
    assert api == ROUTERS
    assert operator["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    assert peers(DEMO, "router", 8000) == [{"namespaceSelector": {}}]
    outside = merged(DEMO, {"service": {"type": "LoadBalancer"}})
    assert peers(outside, "router", 8000) == ["everybody"]
    assert ROUTERS in peers(outside, "engine", 8000)


def test_admin_ports_are_for_the_operator_metrics_and_the_routers_at_engines() -> None:
    scraper = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    spec = merged(DEMO, {"networkPolicy": {"metricsFrom": [scraper]}})
    operator, *others = peers(spec, "router", 9000)
    assert others == [scraper]
    assert peers(spec, "engine", 9000) == [operator, ROUTERS, scraper]


def test_users_reach_engines_where_a_gateway_leads_them_past_the_routers() -> None:
    assert {"namespaceSelector": {}} in peers(merged(DEMO, POOL), "engine", 8000)
    named = merged(merged(DEMO, POOL), {"networkPolicy": {"ingressFrom": [CALLER]}})
    assert peers(named, "engine", 8000)[0] == CALLER
    outside = merged(merged(DEMO, POOL), {"service": {"type": "NodePort"}})
    assert peers(outside, "engine", 8000) == ["everybody"]
    pool = made(merged(DEMO, POOL), "InferencePool", "")["spec"]
    engines = made(DEMO, "StatefulSet", "engine")["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= engines.items()
    assert pool["targetPorts"] == [{"number": 8000}]
    assert pool["endpointPickerRef"]["port"] == {"number": 9002}


def test_routers_reach_names_the_api_server_and_engines() -> None:
    options = OperatorOptions(api_server_ports="8443", api_server_cidrs="10.0.0.1/32,10.0.0.2/32")
    _, api_server, engines = made(DEMO, "NetworkPolicy", options=options)["spec"]["egress"]
    assert [port["port"] for port in api_server["ports"]] == [8443]
    assert [peer["ipBlock"]["cidr"] for peer in api_server["to"]] == ["10.0.0.1/32", "10.0.0.2/32"]
    assert [port["port"] for port in engines["ports"]] == [8000, 9000]
    _, anywhere, _ = made(DEMO, "NetworkPolicy")["spec"]["egress"]
    assert "to" not in anywhere


def test_an_operator_upgrade_alone_changes_no_routers_template() -> None:
    who, live = deployment(DEMO), made(DEMO, "Deployment")
    newer = replace(OPTIONS, router_image="prism-router:9.9.9")
    options, version = versions.ROUTER.pinned(who, newer, live)
    [kept] = [body for body in children(who, options, NEWEST, router_version=version) if body["kind"] == "Deployment"]
    assert kept == live


@pytest.mark.parametrize(
    ("change", "is_new"),
    [
        ({"replicas": 4}, False),
        ({"router": {"replicas": 4}}, False),
        ({"kv": {"dtype": "bf16"}}, False),
        ({"image": {"version": "0.1.0"}}, True),
        ({"drain": {"streamSeconds": 700}}, True),
        ({"router": {"overrides": {"upstream": {"max_tries": 2}}}}, True),
    ],
)
def test_what_reaches_their_template_moves_routers_to_the_newest_image(change: Object, is_new: bool) -> None:
    live = made(HUB, "Deployment")
    newer = replace(OPTIONS, router_image="prism-router:9.9.9")
    options, _ = versions.ROUTER.pinned(changed(change), newer, live)
    assert (options.router_image == "prism-router:9.9.9") is is_new


@pytest.mark.parametrize("name", SPECS)
def test_no_template_changes_without_its_inputs(name: str) -> None:
    """What `versions.py` says is read is all that is read."""
    unrelated = {
        "kv": {"hostMemory": "1Gi"},
        "replicas": 9,
        "auth": {"apiKeysSecret": "x"},
        "startup": {"stallSeconds": 9},
    }
    other = merged(SPECS[name], unrelated)
    assert versions.ROUTER.inputs(deployment(other)) == versions.ROUTER.inputs(deployment(SPECS[name]))
    assert pod(other) == pod(SPECS[name])


@pytest.mark.parametrize("group", [{}, {"replicas": 2}, {"replicas": 7}, {"overrides": {}}, {"podTemplate": {}}])
def test_taking_the_group_out_of_the_spec_leaves_two_routers_with_the_template_of_the_defaults(group: Object) -> None:
    said = merged(DEMO, {"router": group})
    assert made(DEMO, "Deployment")["spec"]["replicas"] == 2
    assert pod(said) == pod(DEMO)
    assert versions.ROUTER.inputs(deployment(said)) == versions.ROUTER.inputs(deployment(DEMO))


def changed(change: Object) -> Deployment:
    return deployment(merged(HUB, change))


def test_an_unknown_template_version_is_refused() -> None:
    with pytest.raises(Refused, match="templateVersion"):
        children(deployment(DEMO), OPTIONS, NEWEST, router_version=9)
