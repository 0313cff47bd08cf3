"""The token of admin listeners: made from the operator's key, written to each deployment's Secret, never read back."""

from __future__ import annotations

import base64
import secrets

from prism_operator.admin_client import admin_token
from prism_operator.api import SECRET, Api, Conflict, NotFound, Object
from prism_operator.children import labels, names
from prism_operator.deployment import LABEL_CLASS, Deployment
from prism_operator.options import OperatorOptions

KEY_BYTES = 32
KEY_FIELD = "key"


def operator_key(api: Api, options: OperatorOptions) -> bytes:
    """Of the Secret with the operator's own name in its own namespace; made once, by whichever operator comes first."""
    namespace, name = options.operator_namespace, options.operator_name
    try:
        return _key_of(api.get(SECRET, namespace, name))
    except NotFound:
        encoded = base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": {KEY_FIELD: encoded}}
    try:
        return _key_of(api.create(SECRET, namespace, body))
    except Conflict:
        return _key_of(api.get(SECRET, namespace, name))


def _key_of(body: Object) -> bytes:
    key = base64.b64decode((body.get("data") or {}).get(KEY_FIELD, ""))
    if len(key) < KEY_BYTES:
        name = body["metadata"]["name"]
        raise ValueError(f"Secret {name} must hold at least {KEY_BYTES} bytes under `{KEY_FIELD}`")
    return key


def token_secret(deployment: Deployment, key: bytes, operator_class: str) -> Object:
    """The Secret that the engine pods mount. The spec does not matter, so it holds for one that cannot be read, too."""
    token = base64.b64encode(admin_token(key, deployment.uid).encode()).decode()
    body = labels.child(
        deployment, "v1", "Secret", names.admin_token(deployment), type="Opaque", data={names.ADMIN_TOKEN_KEY: token}
    )
    body["metadata"]["labels"][LABEL_CLASS] = operator_class
    return body
