"""Every name that the operator gives, and every path inside its pods."""

from __future__ import annotations

import hashlib
import re

from prism_operator.deployment import Deployment

STEM_CHARS = 45
"""So that `<stem>-engine` leaves room for the `-0123456789` that a StatefulSet's revision label adds (63 in all)."""
HASH_CHARS = 8
ENGINE_SUFFIX = "-engine"
_PLAIN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

API_PORT = 8000
ADMIN_PORT = 9000
CONTAINER = "prism-serve"
ROUTER_CONTAINER = "prism-router"
CONFIG_KEY = "config.json"
ADMIN_TOKEN_KEY = "token"

CONFIG_DIR = "/etc/prism/config"
ADMIN_TOKEN_DIR = "/etc/prism/admin-token"
API_KEYS_DIR = "/etc/prism/api-keys"
MODEL_DIR = "/models"
HOME_DIR = "/home/prism"
CACHE_DIR = "/cache"


def stem(deployment: Deployment) -> str:
    """The start of every child's name and the value of the deployment label: a DNS label (RFC 1035).

    It is the deployment's own name wherever that can be. A name that is cut, has dots or a first digit gets a hash, and
    so does one that ends like a child's: `a-engine` must not meet the headless Service of `a`.
    """
    name = deployment.name
    if len(name) <= STEM_CHARS and _PLAIN.fullmatch(name) and not name.endswith(ENGINE_SUFFIX):
        return name
    clean = re.sub(r"[^a-z0-9]+", "-", name)
    if not clean[0].isalpha():
        clean = f"p-{clean}"
    return f"{clean[: STEM_CHARS - HASH_CHARS - 1].rstrip('-')}-{content_hash(name)[:HASH_CHARS]}"


def engine(deployment: Deployment) -> str:
    """StatefulSet, headless Service, ServiceAccount, PodDisruptionBudget and NetworkPolicy of the engines."""
    return stem(deployment) + ENGINE_SUFFIX


def router(deployment: Deployment) -> str:
    """Deployment, ServiceAccount, Role, RoleBinding, PodDisruptionBudget and NetworkPolicy of the routers."""
    return f"{stem(deployment)}-router"


def inference_pool(deployment: Deployment) -> str:
    return stem(deployment)


def service(deployment: Deployment) -> str:
    """The Service that users call."""
    return stem(deployment)


def autoscaler(deployment: Deployment) -> str:
    return stem(deployment)


def config(deployment: Deployment, content: str) -> str:
    """Of the ConfigMap with that content."""
    return f"{stem(deployment)}-config-{content_hash(content)[:10]}"


def admin_token(deployment: Deployment) -> str:
    """The Secret with the token of `/internal/*`; written by the reconciler, key `token`."""
    return f"{stem(deployment)}-admin-token"


def model_store(deployment: Deployment) -> str:
    """The claim that downloads are kept in, unless the spec names one."""
    return f"{stem(deployment)}-models"


def loader(deployment: Deployment) -> str:
    """The loader's NetworkPolicy."""
    return f"{stem(deployment)}-loader"


def loader_job(deployment: Deployment, inputs: str) -> str:
    """A Job's template is immutable: another download is another Job."""
    return f"{loader(deployment)}-{content_hash(inputs)[:HASH_CHARS]}"


def model_directory(repository: str, revision: str) -> str:
    """Where a download lies in its claim. Claims can be shared, so it tells repositories and revisions apart."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", repository).lstrip(".")
    return f"{readable}-{content_hash(f'{repository}@{revision}')[:HASH_CHARS]}"


def content_hash(text: str) -> str:
    """SHA-256 in hex; names carry its first digits."""
    return hashlib.sha256(text.encode()).hexdigest()
