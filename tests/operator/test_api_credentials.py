"""The connection's credentials, handed on to the watches."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubernetes import client
from kubernetes.config.incluster_config import InClusterConfigLoader

from prism_operator.api import Api


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """A service account as the kubelet mounts it."""
    (tmp_path / "token").write_text("first")
    (tmp_path / "ca.crt").write_text("-----BEGIN CERTIFICATE-----")
    return tmp_path


def test_a_pods_token_is_handed_on_without_its_scheme(account: Path) -> None:
    settings = client.Configuration()
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    InClusterConfigLoader(account / "token", account / "ca.crt", environ=environment).load_and_set(settings)
    handed_on = Api(client.ApiClient(settings)).credentials()
    assert handed_on["token"] == "first"
    assert handed_on["server"] == "https://10.96.0.1:443"
    assert handed_on["ca_path"] == account / "ca.crt"


def test_a_kubeconfigs_token_is_handed_on_without_its_scheme() -> None:
    settings = client.Configuration()
    settings.api_key["BearerToken"] = "Bearer mine"
    assert Api(client.ApiClient(settings)).credentials()["token"] == "mine"
    assert Api(client.ApiClient(client.Configuration())).credentials()["token"] is None
