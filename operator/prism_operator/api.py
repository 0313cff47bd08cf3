"""The API server: the few calls that the operator makes, over the official client's connection and credentials.

Objects are plain dicts. Every call has a time-out. Errors are types; who gets one comes back later with another pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from prism_operator.crd.base import GROUP, KIND, PLURAL, VERSION
from prism_operator.deployment import MANAGED_BY

Object = dict[str, Any]

TIMEOUT_S = 8.0
"""Below every lease deadline: a call that hangs costs the lease, it never outlives it."""
PAGE_ITEMS = 500
UNTYPED_APPLY = "failed to create typed patch object"
"""The API server answers 500 to an apply whose fields are not in the schema."""
WEBHOOK_AWAY = "failed calling webhook"
"""It answers 500, too, where an admission webhook that has to be asked does not answer."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A resource type of the API. An optional one may be missing in a cluster."""

    api_version: str
    kind: str
    plural: str
    is_optional: bool = False
    is_namespaced: bool = True

    @property
    def group_path(self) -> str:
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        place = f"/namespaces/{quote(namespace)}" if self.is_namespaced and namespace else ""
        tail = "".join(f"/{quote(part)}" for part in (name, subresource) if part)
        return f"{self.group_path}{place}/{self.plural}{tail}"


PRISM_DEPLOYMENT = Kind(f"{GROUP}/{VERSION}", KIND, PLURAL)
POD = Kind("v1", "Pod", "pods")
NODE = Kind("v1", "Node", "nodes", is_namespaced=False)
SECRET = Kind("v1", "Secret", "secrets")
EVENT = Kind("v1", "Event", "events")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
CONTROLLER_REVISION = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
JOB = Kind("batch/v1", "Job", "jobs")
AUTOSCALER = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
CUSTOM_RESOURCE_DEFINITION = Kind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", is_namespaced=False
)
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")

CHILD_KINDS: tuple[Kind, ...] = (
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    CONFIG_MAP,
    Kind("v1", "Service", "services"),
    CLAIM,
    STATEFUL_SET,
    DEPLOYMENT,
    JOB,
    Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    AUTOSCALER,
    Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects", is_optional=True),
    Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors", is_optional=True),
    Kind("inference.networking.k8s.io/v1", "InferencePool", "inferencepools", is_optional=True),
)
"""What a PrismDeployment may own and the operator may read: Secrets are written, never read."""


class ApiError(Exception):
    """The API server refused or could not be reached (status 0). `causes` are its single reasons, where it has some."""

    def __init__(self, status: int, reason: str, message: str, causes: Sequence[str] = ()) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = tuple(causes)


class NotFound(ApiError):
    """404."""


class Conflict(ApiError):
    """409: it exists already, has changed, or fields belong to another manager."""


class Forbidden(ApiError):
    """403: RBAC, a quota, an admission rule; 500, where nobody can be asked about the rule."""


class Invalid(ApiError):
    """400 or 422: the object itself is not valid."""


class TooManyRequests(ApiError):
    """429: for an eviction, a disruption budget that has nothing left."""


_ERRORS: Mapping[int, type[ApiError]] = {
    400: Invalid,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    422: Invalid,
    429: TooManyRequests,
}


class Api:
    """Safe to use from several threads. Every method raises ApiError, or the narrower one that it names."""

    def __init__(self, connection: client.ApiClient, timeout_s: float = TIMEOUT_S) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self.num_writes = 0
        """Calls that may have changed something; for metrics and tests."""

    @classmethod
    def connect(cls, timeout_s: float = TIMEOUT_S) -> Api:
        """As the pod's service account, or by KUBECONFIG outside a cluster."""
        settings = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        settings.retries = False
        return cls(client.ApiClient(settings), timeout_s)

    def credentials(self) -> dict[str, Any]:
        """Who this connection is, for another client: server, CA, and a token or a certificate, fresh."""
        settings = self._connection.configuration
        bearer = settings.get_api_key_with_prefix("BearerToken")
        return {
            "server": settings.host,
            "ca_path": settings.ssl_ca_cert,
            "insecure": not settings.verify_ssl,
            "token": bearer.split()[-1] if bearer else None,  # in a pod it begins with `bearer`, else with `Bearer`
            "certificate_path": settings.cert_file,
            "private_key_path": settings.key_file,
        }

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Raises NotFound."""
        return self.call("GET", kind.path(namespace, name))

    def list(self, kind: Kind, namespace: str = "", labels: str = "", fields: str = "") -> list[Object]:
        """Items with `apiVersion` and `kind` filled in, without what nobody here reads; an empty namespace means all.
        In pages: thousands of nodes in one answer are more memory than the operator has. NotFound: no such API here."""
        asked = {"labelSelector": labels, "fieldSelector": fields, "limit": str(PAGE_ITEMS)}
        query, found = {key: value for key, value in asked.items() if value}, []
        while True:
            answer = self.call("GET", kind.path(namespace), query)
            for item in answer.get("items") or ():
                item["metadata"].pop("managedFields", None)
                if kind is NODE:
                    item.get("status", {}).pop("images", None)
                found.append({"apiVersion": kind.api_version, "kind": kind.kind, **item})
            query["continue"] = answer.get("metadata", {}).get("continue") or ""
            if not query["continue"]:
                return found

    def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        """Raises Conflict when it is there already."""
        return self.call("POST", kind.path(namespace), {"fieldManager": MANAGED_BY}, body)

    def replace(self, kind: Kind, namespace: str, body: Object) -> Object:
        """Raises Conflict when it is no longer at the body's resourceVersion."""
        return self.call("PUT", kind.path(namespace, body["metadata"]["name"]), {"fieldManager": MANAGED_BY}, body)

    def apply(self, kind: Kind, namespace: str, body: Object, *, force: bool = False, dry_run: bool = False) -> Object:
        """Server-side apply as `prism-operator`. Raises Conflict when another manager owns a field, unless forced."""
        query = {"fieldManager": MANAGED_BY, "force": str(force).lower()} | ({"dryRun": "All"} if dry_run else {})
        path = kind.path(namespace, body["metadata"]["name"])
        return self.call("PATCH", path, query, body, content_type="application/apply-patch+yaml")

    def merge_status(self, kind: Kind, namespace: str, name: str, status: Object) -> Object:
        """Merges into the status subresource; lists are replaced, keys with None removed. Raises NotFound."""
        path = kind.path(namespace, name, "status")
        patch = {"status": status}
        return self.call(
            "PATCH", path, {"fieldManager": MANAGED_BY}, patch, content_type="application/merge-patch+json"
        )

    def delete(self, kind: Kind, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        """Only while it is still that very object. Gone already is well."""
        body: Object = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self.call("DELETE", kind.path(namespace, name), body=body)
        except (NotFound, Conflict):
            return

    def evict(self, namespace: str, name: str, uid: str) -> None:
        """Through the Eviction API. Raises TooManyRequests while the disruption budget has nothing left."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            self.call("POST", POD.path(namespace, name, "eviction"), body=body)
        except (NotFound, Conflict):
            return

    def has(self, kind: Kind) -> bool:
        """Whether the API server serves this type."""
        try:
            answer = self.call("GET", kind.group_path)
        except NotFound:
            return False
        return any(resource["name"] == kind.plural for resource in answer.get("resources") or ())

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """One request; the answer's JSON."""
        if method != "GET" and (query or {}).get("dryRun") is None:
            self.num_writes += 1
        headers = {"Accept": "application/json", "Content-Type": content_type}
        request = self._connection.param_serialize(
            method, path, None, list((query or {}).items()), headers, body, auth_settings=["BearerToken"]
        )
        try:
            answer = self._connection.call_api(*request, _request_timeout=self._timeout_s)
            content = answer.read()  # type: ignore[no-untyped-call]
        except ApiException as error:
            raise _error(error.status or 0, error.reason or "", error.body) from error
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(0, "Unreachable", str(error)) from error
        if answer.status >= 400:
            raise _error(answer.status, answer.reason or "", content)
        said = _object_or_none(content or b"{}")
        if said is None:  # a proxy's page, or half of an answer
            raise ApiError(answer.status, "NoJSON", f"{path}: {str(content)[:500]}")
        return said


def _object_or_none(content: bytes | str) -> Object | None:
    try:
        said = json.loads(content)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _error(status: int, reason: str, body: bytes | str | None) -> ApiError:
    said = _object_or_none(body or b"{}")
    if said is None:
        said = {"message": str(body)[:500]}
    causes = [cause.get("message", "") for cause in (said.get("details") or {}).get("causes") or ()]
    message = said.get("message") or reason
    kind = _ERRORS.get(status, ApiError)
    if status == 500 and message.startswith(UNTYPED_APPLY):
        kind = Invalid
    if status == 500 and WEBHOOK_AWAY in message:
        kind = Forbidden
    return kind(status, reason, message, causes)


def kinds_by_name(kinds: Sequence[Kind] = (*CHILD_KINDS, SECRET)) -> dict[tuple[str, str], Kind]:
    """(apiVersion, kind) -> Kind."""
    return {(kind.api_version, kind.kind): kind for kind in kinds}
