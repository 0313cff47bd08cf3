"""What the API server itself says to specs with clips and links, by schema and CEL."""

from __future__ import annotations

import os
from typing import Any

import pytest
from operator_cluster import DEMO, World

from prism_operator.api import PRISM_DEPLOYMENT, Invalid, Kind

if not os.environ.get("KUBECONFIG"):
    pytest.skip("needs a cluster: KUBECONFIG", allow_module_level=True)
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
LINKS: dict[str, Any] = {"hosts": ["media.example.org", "*.cdn.example.org"], "privateNetworks": ["10.8.0.0/16"]}


@pytest.mark.parametrize(
    ("media", "says"),
    [
        ({"links": {"hosts": []}}, "at least 1 items"),
        ({"links": {"hosts": ["https://example.org"]}}, "hosts"),
        ({"links": LINKS | {"maxSize": "256Mi"}}, "maxRequestSize must hold one link"),
        ({"links": LINKS | {"timeoutSeconds": 700}}, "at most engine.requestTimeoutSeconds"),
        ({"video": {"maxTokens": 32768}}, "below engine.maxContextTokens"),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_stored(world: World, media: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        world.put({**DEMO, "media": media})


def test_clips_and_links_are_stored_with_their_defaults_and_applied_once(world: World) -> None:
    world.put({**DEMO, "media": {"links": LINKS, "video": {"maxSeconds": 60}}})
    media = world.api.get(PRISM_DEPLOYMENT, world.namespace, "demo")["spec"]["media"]
    assert (media["links"]["maxRequestSize"], media["links"]["timeoutSeconds"]) == ("128Mi", 30)
    assert media["video"] == {"maxTokens": 12288, "maxSeconds": 60}
    world.step()
    policy = world.get(POLICY, "demo-engine")
    assert policy is not None
    world.step()
    again = world.get(POLICY, "demo-engine")
    assert again is not None
    assert again["metadata"]["resourceVersion"] == policy["metadata"]["resourceVersion"]
    assert {"ipBlock": {"cidr": "10.8.0.0/16"}} in again["spec"]["egress"][1]["to"]
