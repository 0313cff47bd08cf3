"""API keys in a Secret that people rotate while the pods serve."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from e2e.harness import PATIENCE_S, Cluster, Object, eventually
from e2e.prism import Deployed, headers, new_namespace, prism_deployment

SECRET = "page-keys"
TIMEOUT_S = 60
OLD, NEW, STAFF = "key-of-spring", "key-of-autumn", "key-of-the-staff"


def keys(namespace: str, **files: str) -> Object:
    """The Secret with exactly these files of keys."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": namespace},
        "stringData": files,
    }


@pytest.fixture(scope="module")
def locked(cluster: Cluster, operator: str) -> Iterator[Deployed]:
    """Asks for keys of a Secret that is not there at first; serves the staff and a team when the fixture is done.

    Tests may change the team's keys.
    """
    with new_namespace(cluster, "locked") as namespace:
        auth = {"apiKeysSecret": SECRET}
        deployed = Deployed.apply(cluster, prism_deployment("locked", namespace, auth=auth))
        deployed.wait("AuthReady", "False", reason="SecretNotMounted", says=SECRET)
        deployed.wait("Available", "False")
        replace(cluster, keys(namespace, staff=STAFF, team=OLD))
        deployed.wait("AuthReady", reason="KeysRead", timeout_s=2 * PATIENCE_S)  # a volume is tried ever more seldom
        deployed.wait("Ready")
        yield deployed
        deployed.delete("--wait=false")


def replace(cluster: Cluster, secret: Object) -> None:
    """Leaves no file of the Secret before."""
    name, namespace = secret["metadata"]["name"], secret["metadata"]["namespace"]
    if cluster.get("secret", name, namespace) is None:
        return cluster.apply(secret)
    return cluster.replace(secret)


def status(deployed: Deployed, key: str | None) -> int:
    """Of a request that computes nothing."""
    return httpx.get(f"{deployed.url}/v1/models", headers=headers(key), timeout=TIMEOUT_S).status_code


@contextmanager
def asking_all_the_time(deployed: Deployed, key: str) -> Iterator[Counter[int | str]]:
    """Counts the statuses of requests with the key while the block runs, and what broke others."""
    url, seen, stop = deployed.url, Counter[int | str](), threading.Event()

    def ask_on() -> None:
        while not stop.wait(0.05):
            try:
                seen[httpx.get(f"{url}/v1/models", headers=headers(key), timeout=TIMEOUT_S).status_code] += 1
            except httpx.HTTPError as error:
                seen[repr(error)] += 1

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def running(deployed: Deployed) -> list[tuple[str, int]]:
    """UIDs of the pods, and how often each has started again."""
    return [
        (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in deployed.engines()
    ]


def test_a_key_of_the_secret_is_asked_for(locked: Deployed) -> None:
    assert status(locked, STAFF) == 200
    assert [status(locked, key) for key in ("key-of-nobody", None)] == [401, 401]


def test_keys_rotate_without_a_restart_and_without_a_401(cluster: Cluster, locked: Deployed) -> None:
    before = running(locked)
    with asking_all_the_time(locked, OLD) as old_key:
        replace(cluster, keys(locked.namespace, staff=STAFF, team=f"{OLD}\n{NEW}\n"))
        eventually("the new key's first answer", lambda: status(locked, NEW) == 200)
    with asking_all_the_time(locked, NEW) as new_key:
        replace(cluster, keys(locked.namespace, staff=STAFF, team=NEW))
        eventually("the old key's end", lambda: status(locked, OLD) == 401)
    assert set(old_key) == set(new_key) == {200}
    assert sum(old_key.values()) > 0
    assert running(locked) == before


def test_a_bad_new_file_keeps_the_last_good_keys_and_shows_in_the_status(cluster: Cluster, locked: Deployed) -> None:
    with asking_all_the_time(locked, STAFF) as seen:
        replace(cluster, keys(locked.namespace, team="# no key in here\n"))
        locked.wait("AuthReady", "False", reason="BadKeys", says="holds no key")
        assert locked.condition("Ready")["status"] == "True", "it serves on"
        replace(cluster, keys(locked.namespace, staff=STAFF))
        locked.wait("AuthReady", reason="KeysRead")
    assert set(seen) == {200}
