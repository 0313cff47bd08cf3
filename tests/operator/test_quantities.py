"""Quantities as people write them in a pod's resources, and as the API server gives them back."""

from __future__ import annotations

from typing import Any

import pytest
from deployments import DEMO, deployment, merged

from prism_operator.children.resources import router_memory_limit_bytes
from prism_operator.crd.quantity import amount_of
from prism_operator.drift import needs_apply, stamped
from prism_operator.refused import Refused


@pytest.mark.parametrize(
    ("written", "given_back"),
    [(0.1, "100m"), (0.7, "700m"), (2, "2"), (0.5, "500m"), ("0.1", "100m"), ("1e3", "1k"), ("1.5Gi", "1536Mi")],
)
def test_a_quantity_in_another_spelling_is_no_drift(written: Any, given_back: str) -> None:
    def workload(amount: Any) -> dict[str, Any]:
        return {"metadata": {}, "spec": {"resources": {"requests": {"cpu": amount}}}}

    wanted = stamped(workload(written))
    there = wanted | {"spec": workload(given_back)["spec"]}
    assert not needs_apply(wanted, there)
    assert needs_apply(wanted, wanted | {"spec": workload("99")["spec"]})


def limited(memory: Any) -> int:
    change = {"router": {"podTemplate": {"resources": {"limits": {"memory": memory}}}}}
    return router_memory_limit_bytes(deployment(merged(DEMO, change)).spec)


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [("2Gi", 2 << 30), ("2e9", 2_000_000_000), ("1Pi", 1 << 50), (1_073_741_824, 1 << 30), ("2147483648000m", 1 << 31)],
)
def test_a_memory_limit_is_read_as_the_api_server_reads_it(written: Any, num_bytes: int) -> None:
    assert limited(written) == num_bytes


@pytest.mark.parametrize(
    "written", ["lots", "", "NaN", "Infinity", "2Gib", None, "1e9999999", "-1e9999999", "9e999999Ki", "8Ei"]
)
def test_what_is_no_quantity_is_refused_with_its_field(written: Any) -> None:
    with pytest.raises(Refused, match=r"router\.podTemplate\.resources: memory"):
        limited(written)
    with pytest.raises(ValueError, match=r".+"):
        amount_of(written)
