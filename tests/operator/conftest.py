"""A real API server with our definition, and a namespace of it for each test marked `cluster`; patience with pods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from operator_cluster import World, install_crd, namespace_of

from prism_operator import admin_client
from prism_operator.api import Api
from prism_operator.options import OperatorOptions


@pytest.fixture
def patient_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods that answer are heard, however busy the machine is."""
    monkeypatch.setattr(admin_client, "READ_TIMEOUT_S", 60.0)


@pytest.fixture(scope="module")
def api() -> Api:
    api = Api.connect()
    install_crd(api)
    return api


@pytest.fixture
def world(api: Api) -> Iterator[World]:
    with namespace_of(api) as namespace:
        yield World(api, namespace, OperatorOptions(operator_namespace=namespace))
