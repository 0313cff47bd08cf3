"""Least privilege, as the rendered roles say it."""

from __future__ import annotations

import itertools

import pytest
from chart_support import Chart, Object, of_kind

from prism_operator.api import CHILD_KINDS
from prism_operator.children.accounts import router_identity
from prism_operator.deployment import Deployment

DEMO: Object = {"model": {"source": {"demo": {}}}}

SCOPES: list[Object] = [{"scope": "cluster"}, {"scope": "namespace"}]


def grants(roles: list[Object]) -> set[tuple[str, str, str]]:
    """(API group, resource, verb) of every rule."""
    return {
        grant
        for role in roles
        for rule in role["rules"]
        for grant in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }


@pytest.mark.parametrize("values", SCOPES, ids=["cluster", "namespace"])
def test_nothing_reads_a_secret_but_the_operator_its_own_key(chart: Chart, values: Object) -> None:
    rules = [
        rule
        for role in of_kind(chart.render(values), "Role", "ClusterRole")
        for rule in role["rules"]
        if any(resource.partition("/")[0] in {"secrets", "*"} for resource in rule["resources"])
    ]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"create", "patch", "get"}
    assert [rule["resourceNames"] for rule in rules if "get" in rule["verbs"]] == [["prism-operator"]]


@pytest.mark.parametrize("values", SCOPES, ids=["cluster", "namespace"])
def test_no_role_is_wider_than_it_says(chart: Chart, values: Object) -> None:
    granted = grants(of_kind(chart.render(values), "Role", "ClusterRole"))
    assert not any("*" in grant for grant in granted)
    assert not {verb for _, _, verb in granted} & {"escalate", "bind", "impersonate"}


@pytest.mark.parametrize("values", SCOPES, ids=["cluster", "namespace"])
def test_the_operator_may_write_its_children_and_nothing_else(chart: Chart, values: Object) -> None:
    kind = "ClusterRole" if values["scope"] == "cluster" else "Role"
    [role] = [role for role in of_kind(chart.render(values), kind) if "prismdeployments/status" in str(role["rules"])
              and "statefulsets" in str(role["rules"])]  # fmt: skip
    verbs = {"get", "list", "watch", "create", "patch", "delete"}
    children = {
        (kind.api_version.rpartition("/")[0], kind.plural, verb) for kind, verb in itertools.product(CHILD_KINDS, verbs)
    }
    read = ("get", "list", "watch")
    others = {
        *(("prism-infer.io", "prismdeployments", verb) for verb in read),
        ("prism-infer.io", "prismdeployments/status", "patch"),
        *(("", "pods", verb) for verb in (*read, "delete")),
        ("", "pods/eviction", "create"),
        *(("apps", "controllerrevisions", verb) for verb in read),
        *(("discovery.k8s.io", "endpointslices", verb) for verb in read),
        *(("", "events", verb) for verb in ("get", "list", "create")),
        *(("", "secrets", verb) for verb in ("create", "patch")),
    }
    if values["scope"] == "cluster":
        others |= {("", "nodes", verb) for verb in read}
        others.add(("apiextensions.k8s.io", "customresourcedefinitions", "get"))
    assert grants([role]) == children | others


@pytest.mark.parametrize("values", SCOPES, ids=["cluster", "namespace"])
def test_the_operator_has_what_it_gives_to_routers(chart: Chart, values: Object) -> None:
    """The API server refuses a Role with more."""
    who = Deployment.from_object({"metadata": {"name": "d", "namespace": "n", "uid": "u"}, "spec": DEMO})
    given = grants([body for body in router_identity(who) if body["kind"] == "Role"])
    assert given
    assert given <= grants(of_kind(chart.render(values), "Role", "ClusterRole"))


def test_the_lease_and_the_key_are_the_operators_own(chart: Chart) -> None:
    objects = chart.render(release="blue")
    [role] = [role for role in of_kind(objects, "Role") if role["metadata"]["name"] == "blue-operator-own"]
    by_name = [rule for rule in role["rules"] if "resourceNames" in rule]
    assert [(rule["resources"], rule["resourceNames"]) for rule in by_name] == [
        (["leases"], ["blue-operator"]),
        (["secrets"], ["blue-operator"]),
    ]
    assert all(rule["verbs"] == ["create"] for rule in role["rules"] if rule not in by_name)


@pytest.mark.parametrize("values", SCOPES, ids=["cluster", "namespace"])
def test_every_binding_names_a_role_and_an_account_of_the_release(chart: Chart, values: Object) -> None:
    objects = chart.render(values)
    there = {(item["kind"], item["metadata"]["name"]) for item in objects}
    bindings = of_kind(objects, "RoleBinding", "ClusterRoleBinding")
    assert bindings
    for binding in bindings:
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in there
        assert all((subject["kind"], subject["name"]) in there for subject in binding["subjects"])


def test_people_get_prismdeployments_by_the_roles_they_have(chart: Chart) -> None:
    people = [
        role
        for role in of_kind(chart.render(), "ClusterRole")
        if role["metadata"]["labels"]["app.kubernetes.io/component"] == "people"
    ]
    by_role = {
        name: grants([role for role in people if role["metadata"]["labels"].get(f"{PREFIX}{name}") == "true"])
        for name in ("admin", "edit", "view")
    }
    assert by_role["admin"] == by_role["edit"] > by_role["view"]
    assert {verb for _, _, verb in by_role["view"]} == {"get", "list", "watch"}
    assert ("prism-infer.io", "prismdeployments", "create") in by_role["edit"]
    assert not any(resource.endswith("status") and verb != "get" for _, resource, verb in by_role["admin"])


PREFIX = "rbac.authorization.k8s.io/aggregate-to-"
