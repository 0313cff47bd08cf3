"""Where models come from: volumes, images, a hub. The bundled model's own files are the checkpoint everywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stand_in_hub import REPOSITORY, StandInHub, serving

from e2e.cluster import images, registry
from e2e.cluster.layout import NODE_ADDRESS, REGISTRY, Layout, files_digest
from e2e.harness import Cluster, Object, eventually
from e2e.prism import Deployed, ask, chat, invoice_pages, new_namespace, prism_deployment, text_of
from prism_server.demo_model import checkpoint_dir

MIB = 1 << 20
FOLDER = "checkpoints/demo"
CLAIM = "model"


def read_totals(deployed: Deployed) -> None:
    """Asks something that only the real weights answer."""
    page = next(page for page in invoice_pages(0) if page.question == "What is the total?")
    assert text_of(ask(deployed.url, chat(page.question, page.png))) == page.answer


def source(**one: Object) -> Object:
    """`model` with this source in place of the bundled one."""
    return {"source": {"demo": None, **one}, "shape": "demo"}


def wanted_claim(namespace: str, spec: Object) -> Object:
    """The claim `model` of a namespace."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": namespace},
        "spec": {**spec, "resources": {"requests": {"storage": "1Gi"}}},
    }


@contextmanager
def claim(cluster: Cluster, namespace: str, folder: Path, access_mode: str) -> Iterator[str]:
    """Yields the name of a claim for a folder of the node."""
    folder.chmod(0o777)
    name = f"{namespace}-model"
    about = {"accessModes": [access_mode], "storageClassName": ""}
    volume: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {**about, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}},
    }
    cluster.apply(volume, wanted_claim(namespace, {**about, "volumeName": name}))
    try:
        yield CLAIM
    finally:
        cluster.kubectl("delete", "pv", name, "--wait=false")


@contextmanager
def node_folder(node: Layout, name: str) -> Iterator[Path]:
    """An empty folder of the node, for everyone."""
    path = node.run / "volumes" / name
    path.mkdir(parents=True)
    path.chmod(0o777)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def folder(own_node: Layout, namespace: str) -> Iterator[Path]:
    """For the test's claim."""
    with node_folder(own_node, namespace) as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def broken(cluster: Cluster, operator: str, own_node: Layout) -> Iterator[Deployed]:
    """Downloads from a hub that breaks off every file at once. With the module, for the loader is patient."""
    files = {path.name: path.read_bytes() for path in checkpoint_dir().iterdir()}
    with (
        new_namespace(cluster, "broken") as namespace,
        node_folder(own_node, namespace) as folder,
        serving(StandInHub(files, cut_after=[0] * 1000), NODE_ADDRESS) as hub,
        claim(cluster, namespace, folder, "ReadWriteMany") as name,
    ):
        model = source(huggingFace=hub_source(hub, name))
        deployed = Deployed.apply(cluster, prism_deployment("broken", namespace, model=model))
        yield deployed
        deployed.delete("--wait=false")


def hub_source(hub: StandInHub, claim_name: str, **more: Object) -> Object:
    """Its one repository, downloaded into the claim."""
    return {"repository": REPOSITORY, "endpoint": hub.url, "storage": {"claimName": claim_name}, **more}


@pytest.fixture(scope="module")
def model_image(own_node: Layout) -> str:
    """An image that holds the checkpoint and nothing else."""
    files = checkpoint_dir()
    tag = files_digest(files.iterdir(), files)
    name = f"{REGISTRY}/prism-e2e-model:{tag}"
    if not registry.holds(own_node, "prism-e2e-model", tag):
        recipe = own_node.run / "model.dockerfile"
        recipe.write_text(f"FROM scratch\nCOPY . /{FOLDER}/\n")
        images.buildah(own_node, "build", "--format", "oci", "-f", recipe, "-t", name, files)
        images.push(own_node, [], name)
    return name


def test_a_checkpoint_in_a_claim_is_served(cluster: Cluster, namespace: str, folder: Path) -> None:
    shutil.copytree(checkpoint_dir(), folder / FOLDER)
    with claim(cluster, namespace, folder, "ReadOnlyMany") as name:
        model = source(pvc={"claimName": name, "path": FOLDER})
        deployed = Deployed.apply(cluster, prism_deployment("claimed", namespace, model=model))
        deployed.wait("Ready")
        deployed.wait("ModelReady", reason="Loaded")
        read_totals(deployed)
        deployed.delete("--wait=false")


def test_a_checkpoint_in_an_image_is_served(cluster: Cluster, namespace: str, model_image: str) -> None:
    model = source(image={"reference": model_image, "path": FOLDER})
    deployed = Deployed.apply(cluster, prism_deployment("imaged", namespace, model=model))
    deployed.wait("Ready")
    deployed.wait("ModelReady", reason="Loaded")
    read_totals(deployed)
    deployed.delete("--wait=false")


def test_what_is_wrong_with_a_volume_is_said_in_its_own_words(cluster: Cluster, namespace: str) -> None:
    claimed = source(pvc={"claimName": "nowhere", "path": FOLDER})
    imaged = source(image={"reference": f"{REGISTRY}/prism-e2e-model:none", "path": FOLDER})
    no_claim = Deployed.apply(cluster, prism_deployment("claimed", namespace, model=claimed))
    no_image = Deployed.apply(cluster, prism_deployment("imaged", namespace, model=imaged))
    no_claim.wait("ModelReady", "False", reason="ClaimNotFound", says="nowhere")
    no_image.wait("ModelReady", "False", says="prism-e2e-model:none")
    no_image.wait("Stalled", says="prism-e2e-model:none")
    for deployed in (no_claim, no_image):
        deployed.wait("Available", "False")
        deployed.delete("--wait=false")


def test_directories_of_the_node_are_refused_unless_the_operator_allows_them(cluster: Cluster, namespace: str) -> None:
    model = source(hostPath={"path": "/srv/model"})
    deployed = Deployed.apply(cluster, prism_deployment("hosted", namespace, model=model))
    deployed.wait("Ready", "False", reason="HostPathNotAllowed")
    deployed.wait("Available", "False", reason="NoPods")
    assert cluster.list("statefulsets", namespace) == []


def test_replicas_do_not_share_a_claim_of_one_node(cluster: Cluster, namespace: str) -> None:
    cluster.apply(wanted_claim(namespace, {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}))
    model = source(pvc={"claimName": CLAIM, "path": FOLDER})
    deployed = Deployed.apply(cluster, prism_deployment("shared", namespace, model=model, replicas=2))
    deployed.wait("ModelReady", "False", reason="AccessMode", says="ReadWriteOnce")


@contextmanager
def bounded(folder: Path, size: int) -> Iterator[Path]:
    """The folder as a file system of that many bytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "prism-e2e", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def secret(name: str, namespace: str, **values: str) -> Object:
    """A Secret of plain values."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": values,
    }


def test_a_download_says_what_is_wrong_and_goes_on_once_it_is_put_right(
    cluster: Cluster, namespace: str, folder: Path
) -> None:
    """A refused token, then a full disk, then a transfer that breaks off: one Job, which nobody starts again."""
    files = {path.name: path.read_bytes() for path in checkpoint_dir().iterdir()}
    with (
        serving(StandInHub(files, token="right"), NODE_ADDRESS) as hub,
        bounded(folder, 8 * MIB),
        claim(cluster, namespace, folder, "ReadWriteMany") as name,
    ):
        cluster.apply(secret("hub-token", namespace, token="wrong"))
        model = source(huggingFace=hub_source(hub, name, tokenSecret={"name": "hub-token"}))
        deployed = Deployed.apply(cluster, prism_deployment("loaded", namespace, model=model))
        deployed.wait("ModelReady", "False", reason="Unauthorized")

        cluster.apply(secret("hub-token", namespace, token="right"))
        deployed.wait("ModelReady", "False", reason="DiskFull")
        deployed.wait("Available", "False")

        hub.cut_after = [MIB]
        subprocess.run(["mount", "-o", f"remount,size={64 * MIB}", folder], check=True)
        deployed.wait("ModelReady", reason="Downloaded")
        resumed = [span for path, span, _ in hub.asked if span is not None]
        assert resumed == [f"bytes={MIB}-"]
        (job,) = cluster.list("jobs", namespace)
        asked = len(hub.asked)
        deployed.wait("Ready")
        read_totals(deployed)
        assert len(hub.asked) == asked, "engines stay offline"
        tokens_elsewhere = [pod for pod in deployed.engines() if "hub-token" in json.dumps(pod["spec"])]
        assert tokens_elsewhere == [], "the loader has the only copy"
        assert job["status"]["succeeded"] == 1
        deployed.delete("--wait=false")
        eventually("the engines' end, before the volume's", lambda: not deployed.engines())


def test_a_hub_that_never_sends_a_file_to_its_end_is_a_broken_transfer(broken: Deployed) -> None:
    broken.wait("ModelReady", "False", reason="BrokenTransfer", says="model-0000")
    broken.wait("Available", "False")
