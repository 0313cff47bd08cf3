"""What holds for the children of every spec."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from deployments import DEMO, HUB, deployment, merged
from test_children_golden import SPECS

from prism_operator.children import OPTIONAL_APIS, children, config, missing_apis, versions
from prism_operator.children.versions import ANNOTATION_DEFAULT_IMAGE
from prism_operator.crd.quantity import quantity_bytes
from prism_operator.deployment import ANNOTATION_TEMPLATE_VERSION, TEMPLATE_VERSIONS
from prism_operator.options import OperatorOptions
from prism_operator.refused import Refused
from prism_server import __version__
from prism_server.settings import ServerSettings

OPTIONS = OperatorOptions(allow_host_path=True)
NEWEST = TEMPLATE_VERSIONS[-1]
Object = dict[str, Any]


def made(spec: Object, kind: str, name: str = "contracts", apis: frozenset[str] = OPTIONAL_APIS) -> list[Object]:
    objects = children(deployment(spec, name), OPTIONS, NEWEST, apis)
    return [body for body in objects if body["kind"] == kind]


def template(spec: Object) -> Object:
    [stateful_set] = made(spec, "StatefulSet")
    found: Object = stateful_set["spec"]["template"]
    return found


def container(spec: Object) -> Object:
    [only] = template(spec)["spec"]["containers"]
    found: Object = only
    return found


@pytest.mark.parametrize("name", SPECS)
def test_the_same_spec_makes_the_same_objects_and_is_not_changed(name: str) -> None:
    who = deployment(SPECS[name])
    before = copy.deepcopy(who)
    first = children(who, OPTIONS, NEWEST, OPTIONAL_APIS)
    kept = copy.deepcopy(first)
    for body in first:
        body["metadata"]["labels"]["spoiled"] = "by the caller"
    assert children(who, OPTIONS, NEWEST, OPTIONAL_APIS) == kept
    assert who == before


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 7},
        {"autoscaling": {"minReplicas": 3, "maxReplicas": 9}},
        {"service": {"type": "NodePort", "port": 81}},
        {"router": {"replicas": 5, "overrides": {"upstream": {"max_tries": 1}}}},
        {"gateway": {"inferencePool": {"endpointPickerRef": {"name": "other"}}}},
        {"networkPolicy": {"ingressFrom": [{"podSelector": {}}]}},
        {"monitoring": {"podMonitor": False, "labels": {"release": "prometheus"}}},
        {"startup": {"stallSeconds": 7}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_pod_template_depends_on_what_stands_beside_the_pods(name: str, change: Object) -> None:
    changed = merged(SPECS[name], change)
    assert template(changed) == template(SPECS[name])
    assert versions.ENGINE.inputs(deployment(changed)) == versions.ENGINE.inputs(deployment(SPECS[name]))


@pytest.mark.parametrize("name", SPECS)
def test_neither_the_clusters_apis_nor_generation_reach_a_pod_template(name: str) -> None:
    who = deployment(SPECS[name])
    later = replace(who, generation=9, annotations={"a": "b"}, labels={"c": "d"})
    with_apis, without = (
        children(d, OPTIONS, NEWEST, apis) for d, apis in ((who, OPTIONAL_APIS), (later, frozenset()))
    )
    pods = ("StatefulSet", "Deployment", "Job")
    pick = [[body for body in made if body["kind"] in pods] for made in (with_apis, without)]
    assert pick[0] == pick[1]


@pytest.mark.parametrize("name", SPECS)
def test_every_child_is_owned_without_blocking_and_has_no_finalizer(name: str) -> None:
    for body in children(deployment(SPECS[name], uid="u-7"), OPTIONS, NEWEST, OPTIONAL_APIS):
        [owner] = body["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("u-7", True, False)
        assert "finalizers" not in body["metadata"]
        assert body["metadata"]["namespace"] == "team"


@pytest.mark.parametrize("version", [0, TEMPLATE_VERSIONS[0] - 1, NEWEST + 1, 99])
def test_an_unknown_template_version_is_refused(version: int) -> None:
    with pytest.raises(Refused, match="templateVersion") as refused:
        children(deployment(DEMO), OPTIONS, version)
    assert refused.value.reason == "UnknownTemplateVersion"


def test_host_path_is_refused_where_the_operator_does_not_allow_it() -> None:
    with pytest.raises(Refused, match="allowHostPath") as refused:
        children(deployment(SPECS["host_path_no_policies"]), OperatorOptions(), NEWEST)
    assert refused.value.reason == "HostPathNotAllowed"


@pytest.mark.parametrize("name", ["a", "a" * 253, "a.b.c", "9lives", "x-engine", f"{'b' * 40}.{'c' * 60}", "a" * 45])
def test_every_name_and_label_fits_and_is_a_dns_label(name: str) -> None:
    for body in children(deployment(merged(HUB, {}), name), OPTIONS, NEWEST, OPTIONAL_APIS):
        limit = 52 if body["kind"] == "StatefulSet" else 63
        given = body["metadata"]["name"]
        assert len(given) <= limit
        assert given[0].isalpha()
        assert given.replace("-", "").isalnum()
        assert all(len(value) <= 63 for value in body["metadata"]["labels"].values())


def test_deployments_whose_names_are_alike_share_no_child() -> None:
    alike = ["a", "a-engine", "a-router", "a.engine", "a-engine-engine", "b" * 60, "b" * 61, "9", "p-9"]
    given = [
        (body["kind"], body["metadata"]["name"])
        for name in alike
        for body in children(deployment(HUB, name), OPTIONS, NEWEST, OPTIONAL_APIS)
    ]
    assert len(set(given)) == len(given)


def test_other_settings_are_another_config_map_and_another_template() -> None:
    [one], [other] = made(DEMO, "ConfigMap"), made(merged(DEMO, {"engine": {"overlap": False}}), "ConfigMap")
    assert one["immutable"]
    assert one["metadata"]["name"] != other["metadata"]["name"]
    volumes = {volume["name"]: volume for volume in template(DEMO)["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == one["metadata"]["name"]


@pytest.mark.parametrize("name", SPECS)
def test_the_server_understands_its_configuration(name: str) -> None:
    [config_map] = made(SPECS[name], "ConfigMap")
    content = json.loads(config_map["data"]["config.json"])
    for secret in ("api_keys_file", "admin_token_file"):
        content["http"].pop(secret, None)  # there in the pod only
    settings = ServerSettings.model_validate(content)
    assert (settings.http.port, settings.http.admin_port) == (8000, 9000)


def test_fixed_pages_become_exactly_their_bytes() -> None:
    settings = config.settings_of(deployment(merged(HUB, {"kv": {"pages": 100}})).spec)
    assert settings.kv.memory_bytes == 100 * 64 * 76_032  # a token of Qwen3-VL-8B in FP8 has 76,032 bytes


def test_fixed_pages_of_an_unknown_model_are_refused() -> None:
    spec = {"model": {"source": {"pvc": {"claimName": "mine"}}}, "kv": {"pages": 100}}
    with pytest.raises(Refused, match=r"model\.shape"):
        children(deployment(spec), OPTIONS, NEWEST)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"engine": {"chunk_token": 1}}, "chunk_token: no such option; there are max_context_tokens"),
        ({"motor": {}}, "motor: no such option; there are model, kv"),
        ({"motor": 3}, "motor must be an object"),
        ({"engine": {"step_budget_ms": "fast"}}, "step_budget_ms: must be a valid number"),
        ({"kv": {"dtype": "bf16"}}, "set spec.kv.dtype instead"),
        ({"http": {"port": 80}}, "ports and probes depend on it"),
        ({"engine": {"max_step_tokens": 8}}, "max_step_tokens 8 must be at least"),
    ],
)
def test_a_wrong_override_is_refused_with_its_place(overrides: Object, says: str) -> None:
    with pytest.raises(Refused, match=says) as refused:
        children(deployment(merged(DEMO, {"engine": {"overrides": overrides}})), OPTIONS, NEWEST)
    assert refused.value.reason == "InvalidSettings"


def test_overrides_for_another_version_pass_unchecked() -> None:
    spec = merged(DEMO, {"image": {"version": "9.9.9"}, "engine": {"overrides": {"engine": {"not_yet": 1}}}})
    [config_map] = made(spec, "ConfigMap")
    assert json.loads(config_map["data"]["config.json"])["engine"]["not_yet"] == 1
    assert not config.is_checked(deployment(spec).spec)
    assert config.is_checked(deployment(merged(DEMO, {"image": {"version": __version__}})).spec)


def test_grace_holds_propagation_streams_and_a_margin() -> None:
    spec = merged(DEMO, {"drain": {"propagationSeconds": 7, "streamSeconds": 700}})
    assert template(spec)["spec"]["terminationGracePeriodSeconds"] == 7 + 700 + 15


def test_the_start_may_take_as_long_as_the_spec_says() -> None:
    probe = container(merged(DEMO, {"startup": {"timeoutSeconds": 61}}))["startupProbe"]
    assert 61 <= probe["periodSeconds"] * probe["failureThreshold"] <= 62


@pytest.mark.parametrize("name", SPECS)
def test_pods_are_restricted_and_the_routers_alone_have_a_token(name: str) -> None:
    for kind in ("StatefulSet", "Deployment", "Job"):
        for pod in (body["spec"]["template"]["spec"] for body in made(SPECS[name], kind)):
            assert pod["automountServiceAccountToken"] is (kind == "Deployment")
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for each in pod["containers"]:
                assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert each["securityContext"]["allowPrivilegeEscalation"] is False


def test_cards_are_asked_for_unless_the_engine_runs_on_the_cpu() -> None:
    assert container(HUB)["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert "limits" not in container(DEMO)["resources"]
    assert container(SPECS["demo_cpu_beside_a_card"])["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_tp2_shared_memory_is_sized_and_counted_in_the_memory_limit() -> None:
    spec = SPECS["pvc_tensor_parallel"]
    [shm] = [volume for volume in template(spec)["spec"]["volumes"] if volume["name"] == "shm"]
    shared = quantity_bytes(shm["emptyDir"]["sizeLimit"])
    assert shm["emptyDir"]["medium"] == "Memory"
    limits = container(spec)["resources"]["limits"]
    assert quantity_bytes(limits["memory"]) == (48 << 30) + shared
    assert limits["nvidia.com/gpu"] == "2"


def test_a_pod_plans_with_its_part_of_the_card_and_with_none_on_the_cpu() -> None:
    def part(spec: Object) -> int:
        return config.settings_of(deployment(spec).spec).kv.gpu_memory_bytes

    assert part(HUB) == 0, "all that the card has"
    assert part(merged(HUB, {"gpu": {"memory": "20Gi"}})) == 20 << 30
    assert part(merged(HUB, {"gpu": {"sharing": "mps", "memory": "20Gi"}})) == 20 << 30
    assert part(merged(DEMO, {"gpu": {"memory": "20Gi"}})) == 0


@pytest.mark.parametrize(("asked", "on_cpu", "with_card"), [(None, True, False), (True, True, True), (False,) * 3])
def test_a_read_only_root_is_the_default_without_a_card_alone(asked: object, on_cpu: bool, with_card: bool) -> None:
    def is_read_only(base: Object) -> object:
        return container(merged(base, {"podTemplate": {"readOnlyRootFilesystem": asked}}))["securityContext"][
            "readOnlyRootFilesystem"
        ]

    assert (is_read_only(DEMO), is_read_only(HUB)) == (on_cpu, with_card)


@pytest.mark.parametrize("resources", [{"limits": "all"}, {"limits": {"memory": "much"}}])
def test_resources_that_cannot_be_read_are_refused(resources: Object) -> None:
    with pytest.raises(Refused, match=r"podTemplate\.resources"):
        container(merged(SPECS["pvc_tensor_parallel"], {"podTemplate": {"resources": resources}}))


def test_the_loader_alone_holds_the_token() -> None:
    spec = SPECS["hugging_face_h200"]
    [job] = made(spec, "Job")
    [loader] = job["spec"]["template"]["spec"]["containers"]
    assert loader["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert not any("valueFrom" in entry for entry in container(spec)["env"])
    mount = {mount["name"]: mount for mount in container(spec)["volumeMounts"]}["model"]
    assert mount["readOnly"]


def test_engine_and_loader_agree_where_the_model_lies() -> None:
    [job], [config_map] = made(HUB, "Job"), made(HUB, "ConfigMap")
    path = json.loads(config_map["data"]["config.json"])["model"]["path"]
    assert f"--directory={path}" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def test_another_revision_is_another_job_and_another_directory() -> None:
    other = merged(HUB, {"model": {"source": {"huggingFace": {"revision": "v2"}}}})
    [one], [two] = made(HUB, "Job"), made(other, "Job")
    assert one["metadata"]["name"] != two["metadata"]["name"]
    assert config.model_path(deployment(HUB).spec) != config.model_path(deployment(other).spec)


def test_a_missing_optional_api_costs_its_child_only() -> None:
    spec = merged(DEMO, {"autoscaling": {"kind": "KEDA"}})
    assert missing_apis(deployment(spec), frozenset()) == ["keda.sh/v1alpha1"]
    everything = {body["kind"] for body in children(deployment(spec), OPTIONS, NEWEST, OPTIONAL_APIS)}
    fewer = {body["kind"] for body in children(deployment(spec), OPTIONS, NEWEST)}
    assert everything - fewer == {"ScaledObject", "PodMonitor"}
    pool = merged(DEMO, {"gateway": {"inferencePool": {"endpointPickerRef": {"name": "picker"}}}})
    assert missing_apis(deployment(pool), frozenset()) == ["inference.networking.k8s.io/v1"]
    assert made(pool, "InferencePool", apis=frozenset()) == []


def test_pod_monitors_have_the_labels_that_are_asked_for_or_are_not_made() -> None:
    labels = {"release": "prometheus", "prism-infer.io/deployment": "another"}
    monitors = made(merged(DEMO, {"monitoring": {"labels": labels}}), "PodMonitor")
    assert [monitor["metadata"]["name"] for monitor in monitors] == ["contracts-engine", "contracts-router"]
    for monitor in monitors:
        found = monitor["metadata"]["labels"]
        assert (found["release"], found["prism-infer.io/deployment"]) == ("prometheus", "contracts")
    assert "release" not in template(merged(DEMO, {"monitoring": {"labels": labels}}))["metadata"]["labels"]
    assert made(merged(DEMO, {"monitoring": {"podMonitor": False}}), "PodMonitor") == []


def test_the_loader_reaches_names_and_the_peers_that_are_named_else_the_hubs_port() -> None:
    def egress(spec: Object) -> list[Object]:
        [policy] = [body for body in made(spec, "NetworkPolicy") if body["metadata"]["name"] == "contracts-loader"]
        found: list[Object] = policy["spec"]["egress"]
        return found

    names, hub = egress(HUB)
    assert hub == {"ports": [{"port": 443, "protocol": "TCP"}]}
    proxy = {"podSelector": {"matchLabels": {"app": "proxy"}}}
    assert egress(merged(HUB, {"networkPolicy": {"loaderEgressTo": [proxy]}})) == [names, {"to": [proxy]}]


@pytest.mark.parametrize("made_with", TEMPLATE_VERSIONS)
def test_an_operator_upgrade_alone_changes_no_pod_template(made_with: int) -> None:
    who = deployment(HUB)
    [live] = [body for body in children(who, OPTIONS, made_with) if body["kind"] == "StatefulSet"]
    newer = replace(OPTIONS, engine_image="prism-server:9.9.9", cpu_image="prism-server-cpu:9.9.9")
    options, version = versions.ENGINE.pinned(who, newer, live)
    [kept] = [body for body in children(who, options, version) if body["kind"] == "StatefulSet"]
    assert kept == live
    scaled = deployment(merged(HUB, {"replicas": 4}))
    assert versions.ENGINE.pinned(scaled, newer, live) == (options, version)


@pytest.mark.parametrize("annotation", [ANNOTATION_TEMPLATE_VERSION, ANNOTATION_DEFAULT_IMAGE])
def test_a_workload_that_somebody_took_an_annotation_from_gets_it_again(annotation: str) -> None:
    [live] = [body for body in children(deployment(HUB), OPTIONS, NEWEST) if body["kind"] == "StatefulSet"]
    del live["metadata"]["annotations"][annotation]
    assert versions.ENGINE.pinned(deployment(HUB), OPTIONS, live) == (OPTIONS, NEWEST)


def test_a_changed_spec_gets_the_new_default_image_and_the_newest_template_unless_it_says_another() -> None:
    oldest = TEMPLATE_VERSIONS[0]
    [live] = [body for body in children(deployment(HUB), OPTIONS, oldest) if body["kind"] == "StatefulSet"]
    newer = replace(OPTIONS, engine_image="prism-server:9.9.9")
    change = merged(HUB, {"engine": {"maxContextTokens": 4096}})
    assert versions.ENGINE.pinned(deployment(change), newer, live) == (newer, NEWEST)
    older = merged(change, {"templateVersion": oldest})
    assert versions.ENGINE.pinned(deployment(older), newer, live) == (newer, oldest)
    assert versions.ENGINE.pinned(deployment(HUB), newer, None)[0] == newer


def test_the_loader_runs_where_engines_may_so_that_its_volume_is_in_their_reach() -> None:
    place = {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"operator": "Exists"}], "affinity": {"podAffinity": {}}}
    [job], [plain] = made(merged(HUB, {"podTemplate": place}), "Job"), made(HUB, "Job")
    assert place.items() <= job["spec"]["template"]["spec"].items()
    assert job["metadata"]["name"] != plain["metadata"]["name"]  # the template of a Job cannot be changed
