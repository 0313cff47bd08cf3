"""`media.video` and `media.links`: what they become, and that nothing changes without them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deployments import DEMO, HUB, deployment, merged

from prism_operator.children import children, versions
from prism_operator.children.config import config_text, settings_of
from prism_operator.deployment import TEMPLATE_VERSIONS
from prism_operator.options import OperatorOptions
from prism_operator.plan import plan_kv
from prism_operator.refused import Refused
from prism_server.capacity.models import KNOWN_MODELS
from prism_server.capacity.plan import PlanRequest, plan_pages
from prism_server.capacity.units import GIB

Object = dict[str, Any]
NEWEST = TEMPLATE_VERSIONS[-1]
LINKS: Object = {"hosts": ["media.example.org"]}


def with_links(base: Object = DEMO, **fields: Any) -> Object:
    return merged(base, {"media": {"links": LINKS | fields}})


def with_video(**fields: Any) -> Object:
    return merged(HUB, {"media": {"video": fields}})


def egress(spec: Object, name: str = "contracts-engine") -> list[Object]:
    """Rules beside the one for names."""
    made = children(deployment(spec), OperatorOptions(), NEWEST)
    [policy] = [body for body in made if (body["kind"], body["metadata"]["name"]) == ("NetworkPolicy", name)]
    rules: list[Object] = policy["spec"]["egress"][1:]
    return rules


def ports(rule: Object) -> list[int]:
    return [port["port"] for port in rule["ports"]]


def cidrs(rule: Object) -> list[str]:
    return [peer["ipBlock"]["cidr"] for peer in rule["to"]]


def test_without_them_the_engine_is_told_nothing_of_clips_and_links() -> None:
    config = json.loads(config_text(deployment(DEMO).spec))
    assert "fetch" not in config
    assert not [option for option in config["media"] if "video" in option]
    assert versions.ENGINE.inputs(deployment(DEMO)) == versions.ENGINE.inputs(deployment(merged(DEMO, {"media": {}})))


def test_the_budget_of_clips_reaches_the_engine_and_the_page_plan() -> None:
    settings = settings_of(deployment(with_video(maxTokens=24_576, maxSeconds=60)).spec)
    assert (settings.media.max_video_tokens, settings.media.max_video_s) == (24_576, 60.0)
    planned = plan_kv(deployment(merged(with_video(maxTokens=24_576), {"gpu": {"memory": "80Gi"}})).spec, None)
    on_paper = plan_pages(PlanRequest(KNOWN_MODELS["8b"], 80 * GIB, max_video_tokens=24_576))
    assert planned.pages == on_paper.num_pages < plan_pages(PlanRequest(KNOWN_MODELS["8b"], 80 * GIB)).num_pages


def test_links_reach_the_engine() -> None:
    spec = with_links(
        allowHttp=True,
        ports=[9000],
        privateNetworks=["10.8.0.0/16"],
        maxSize="32Mi",
        maxRequestSize="96Mi",
        timeoutSeconds=20,
        cacheSize="0",
    )
    fetch = settings_of(deployment(spec).spec).fetch
    assert (fetch.hosts, fetch.allow_http, fetch.ports) == (("media.example.org",), True, (9000,))
    assert [str(network) for network in fetch.private_networks] == ["10.8.0.0/16"]
    assert (fetch.max_bytes, fetch.max_request_bytes, fetch.cache_bytes) == (32 << 20, 96 << 20, 0)
    assert fetch.total_timeout_s == 20


def test_the_fields_defaults_are_the_engines() -> None:
    plain = settings_of(deployment(DEMO).spec)
    told = settings_of(deployment(merged(with_links(), {"media": {"video": {}}})).spec)
    assert told.media == plain.media
    assert told.fetch.model_copy(update={"hosts": ()}) == plain.fetch


def test_engines_are_let_out_to_public_addresses_on_the_links_ports_alone() -> None:
    assert egress(DEMO) == []
    [rule] = egress(with_links())
    assert ports(rule) == [443]
    assert cidrs(rule) == ["0.0.0.0/0", "::/0"]
    closed = {cidr for peer in rule["to"] for cidr in peer["ipBlock"]["except"]}
    assert {"10.0.0.0/8", "169.254.0.0/16", "fc00::/7"} <= closed
    [rule] = egress(with_links(allowHttp=True))
    assert ports(rule) == [80, 443]
    [rule] = egress(with_links(ports=[9000, 443], privateNetworks=["10.8.0.0/16"]))
    assert ports(rule) == [443, 9000]
    assert cidrs(rule) == ["0.0.0.0/0", "::/0", "10.8.0.0/16"]


def test_routers_and_loaders_are_let_out_no_further_by_links() -> None:
    for name in ("contracts-router", "contracts-loader"):
        assert egress(with_links(HUB), name) == egress(HUB, name)


def test_who_says_what_engines_may_reach_says_it_for_links_too() -> None:
    gateway = {"podSelector": {"matchLabels": {"app": "egress"}}}
    assert egress(merged(with_links(), {"networkPolicy": {"egressTo": [gateway]}})) == [{"to": [gateway]}]


OVERRIDES: Object = {"fetch": {"hosts": ["media.example.org"], "concurrency": 4}, "media": {"max_video_tokens": 2048}}


def test_overrides_say_what_the_spec_does_not_as_they_did_before_there_were_fields() -> None:
    spec = merged(DEMO, {"engine": {"overrides": OVERRIDES}})
    settings = settings_of(deployment(spec).spec)
    assert (settings.fetch.hosts, settings.media.max_video_tokens) == (("media.example.org",), 2048)
    assert egress(spec) == []
    beside = merged(with_links(), {"engine": {"overrides": {"fetch": {"concurrency": 4}}}})
    assert settings_of(deployment(beside).spec).fetch.concurrency == 4


@pytest.mark.parametrize(
    ("media", "field"), [({"links": LINKS}, "media.links.hosts"), ({"video": {}}, "media.video.maxTokens")]
)
def test_overrides_that_say_a_field_a_second_time_are_refused(media: Object, field: str) -> None:
    spec = merged(DEMO, {"media": media, "engine": {"overrides": OVERRIDES}})
    with pytest.raises(Refused, match=rf"set spec\.{field} instead"):
        settings_of(deployment(spec).spec)


def test_what_the_engine_would_not_start_with_names_the_field() -> None:
    with pytest.raises(Refused, match=r"media\.links\.maxSize or engine\.overrides\.fetch\.max_bytes: must be"):
        settings_of(deployment(with_links(maxSize="0")).spec)
    with pytest.raises(Refused, match=r"media\.links\.hosts or .*'1::2::3' is no host"):
        settings_of(deployment(with_links(hosts=["1::2::3"])).spec)
