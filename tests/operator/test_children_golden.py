"""The objects of a table of specs, byte by byte. `PRISM_REWRITE_GOLDEN=1` writes the files anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployments import DEMO, HUB, deployment, merged

from prism_operator.children import OPTIONAL_APIS, children
from prism_operator.deployment import ROUTER_TEMPLATE_VERSIONS, TEMPLATE_VERSIONS
from prism_operator.options import OperatorOptions

OPTIONS = OperatorOptions(allow_host_path=True)
GOLDEN = Path(__file__).parent / "golden"
REWRITE = os.environ.get("PRISM_REWRITE_GOLDEN") == "1"

SPECS: dict[str, dict[str, Any]] = {
    "demo_cpu": DEMO,
    "demo_cpu_beside_a_card": merged(
        DEMO,
        {
            "kv": {"pages": 64},
            "gpu": {"memory": "32Gi"},
            "podTemplate": {"resources": {"limits": {"nvidia.com/gpu": "1", "memory": "4Gi"}}},
        },
    ),
    "hugging_face_h200": merged(
        HUB,
        {
            "model": {
                "source": {
                    "huggingFace": {
                        "revision": "0c351dd",
                        "tokenSecret": {"name": "hub"},
                        "storage": {"size": "40Gi", "storageClassName": "fast"},
                    }
                }
            },
            "replicas": 3,
            "autoscaling": {"minReplicas": 2, "maxReplicas": 8},
            "auth": {"apiKeysSecret": "keys"},
            "kv": {"hostMemory": "64Gi"},
        },
    ),
    "pvc_tensor_parallel": {
        "model": {"source": {"pvc": {"claimName": "models", "path": "qwen3-vl-32b"}}},
        "engine": {"tensorParallel": 2, "overrides": {"engine": {"chunk_tokens": 2048}}},
        "kv": {"dtype": "bf16", "memoryFractionPercent": 90},
        "podTemplate": {
            "resources": {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"memory": "48Gi"}},
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "labels": {"team": "a", "app.kubernetes.io/name": "theirs"},
            "annotations": {"note": "b"},
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "imagePullSecrets": ["pull"],
        },
    },
    "image_volume_public": {
        "model": {"source": {"image": {"reference": "registry/models/qwen3-vl-4b:v1", "path": "files"}}},
        "image": {"reference": "registry/prism-server:dev", "pullPolicy": "Always"},
        "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"lb": "internal"}},
        "networkPolicy": {
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "egressTo": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        },
        "monitoring": {"labels": {"release": "prometheus", "app.kubernetes.io/name": "theirs"}},
        "podTemplate": {"readOnlyRootFilesystem": True},
        "router": {
            "replicas": 3,
            "image": {"reference": "registry/prism-router:dev", "pullPolicy": "Always"},
            "overrides": {"upstream": {"max_tries": 2}, "http": {"max_buffered_bytes": 1 << 29}},
            "podTemplate": {
                "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}},
                "nodeSelector": {"pool": "front"},
                "labels": {"team": "a", "app.kubernetes.io/component": "theirs"},
                "annotations": {"note": "b"},
                "priorityClassName": "high",
            },
        },
        "gateway": {"inferencePool": {"endpointPickerRef": {"name": "picker"}}},
        "autoscaling": {"kind": "KEDA", "maxReplicas": 4, "scaleDownSeconds": 60},
    },
    "host_path_no_policies": {
        "model": {"source": {"hostPath": {"path": "/srv/qwen3-vl-2b"}}},
        "networkPolicy": {"enabled": False},
        "drain": {"propagationSeconds": 0, "streamSeconds": 900},
        "startup": {"timeoutSeconds": 61},
        "gpu": {"resourceName": "nvidia.com/mig-3g.20gb"},
        "monitoring": {"podMonitor": False},
    },
    "shared_claim_mirror": merged(
        HUB,
        {
            "model": {
                "source": {"huggingFace": {"endpoint": "http://hub.mirror:8080", "storage": {"claimName": "all"}}}
            },
            "networkPolicy": {
                "ingressFrom": [{"podSelector": {"matchLabels": {"app": "web"}}}],
                "loaderEgressTo": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
            },
            "gpu": {"sharing": "time-slicing", "memory": "20Gi"},
        },
    ),
    "clips_and_links": merged(
        HUB,
        {
            "media": {
                "video": {"maxTokens": 24576},
                "links": {
                    "hosts": ["media.example.org", "*.cdn.example.org"],
                    "ports": [9000, 443],
                    "privateNetworks": ["10.8.0.0/16", "fd00:8::/64"],
                    "timeoutSeconds": 20,
                },
            }
        },
    ),
}


class ReadableDumper(yaml.SafeDumper):
    """Texts of several lines as blocks, so that a difference can be read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


ReadableDumper.add_representer(str, _text)


@pytest.mark.parametrize("version", TEMPLATE_VERSIONS)
@pytest.mark.parametrize("name", SPECS)
def test_children_are_the_golden_ones(name: str, version: int) -> None:
    objects = children(deployment(SPECS[name]), OPTIONS, version, OPTIONAL_APIS)
    compare([body for body in objects if body["kind"] != "Deployment"], GOLDEN / f"v{version}" / f"{name}.yaml")


@pytest.mark.parametrize("version", ROUTER_TEMPLATE_VERSIONS)
@pytest.mark.parametrize("name", SPECS)
def test_routers_are_the_golden_ones(name: str, version: int) -> None:
    """They have versions of their own: what changes in their template changes no engine's."""
    objects = children(deployment(SPECS[name]), OPTIONS, TEMPLATE_VERSIONS[-1], OPTIONAL_APIS, version)
    compare([body for body in objects if body["kind"] == "Deployment"], GOLDEN / f"router_v{version}" / f"{name}.yaml")


def compare(objects: list[dict[str, Any]], path: Path) -> None:
    text = yaml.dump_all(objects, Dumper=ReadableDumper, sort_keys=False, width=120)
    if REWRITE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_every_golden_file_has_its_spec() -> None:
    found = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.yaml")}
    folders = [f"v{version}" for version in TEMPLATE_VERSIONS]
    folders += [f"router_v{version}" for version in ROUTER_TEMPLATE_VERSIONS]
    assert found == {f"{folder}/{name}.yaml" for folder in folders for name in SPECS}
