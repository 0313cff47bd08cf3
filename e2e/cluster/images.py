"""Images: the pause container, a base without outside registries, and Prism's own. What did not change is not built."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from e2e.cluster import registry
from e2e.cluster.layout import HERE, REGISTRY, REPOSITORY, Layout, files_digest
from e2e.cluster.node import PAUSE_IMAGE
from e2e.cluster.phases import phase

DOCKERFILES = HERE / "dockerfiles"
SUITE = "bookworm"
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
BASE = "prism-e2e-base"
PROJECT = ("operator", "router", "server-cpu")
"""What e2e runs; `images/build.sh` puts `prism-` before each name."""
SOURCES = ("images", "operator", "prism_server", "pyproject.toml", "README.md", "LICENSE")
"""All that the Dockerfiles copy."""
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")


def builder_environment(layout: Layout) -> dict[str, str]:
    """buildah with a storage of its own, so that the builds of the person who runs this stay as they are."""
    layout.buildah.mkdir(parents=True, exist_ok=True)
    file = layout.buildah / "storage.conf"
    store, run = layout.buildah / "store", layout.buildah / "run"
    file.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{store}"\nrunroot = "{run}"\n')
    return {**os.environ, "CONTAINERS_STORAGE_CONF": str(file), "BUILDAH_ISOLATION": "chroot"}


def buildah(layout: Layout, *arguments: str | Path, prefix: list[str] | None = None) -> str:
    """Runs it. Returns what it prints, which is shown only when it fails."""
    command = [*(prefix or []), "buildah", *map(str, arguments)]
    done = subprocess.run(
        command, env=builder_environment(layout), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def pause(layout: Layout) -> Path:
    """Archive of the image that holds every pod's namespaces."""
    archive = layout.images / f"pause-{layout.programs.name}.tar"
    if not archive.exists():
        layout.images.mkdir(parents=True, exist_ok=True)
        buildah(layout, "build", "-f", DOCKERFILES / "pause", "-t", PAUSE_IMAGE, layout.programs)
        partial = archive.with_suffix(".partial")
        buildah(layout, "push", PAUSE_IMAGE, f"docker-archive:{partial}:{PAUSE_IMAGE}")
        partial.rename(archive)
    return archive


@cache
def base_tag() -> str:
    """Changes with the recipe and with the machine's certificates."""
    recipe = [SUITE, *BASE_PACKAGES, (DOCKERFILES / "base").read_text(), CA_BUNDLE.read_text()]
    return hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:12]


def base(layout: Layout) -> str:
    """Builds the base image where it is missing, and puts it into the registry: tests use it as well. Its name."""
    name = f"{REGISTRY}/{BASE}:{base_tag()}"
    if registry.holds(layout, BASE, base_tag()):
        return name
    with phase("base image"), TemporaryDirectory(prefix="prism-e2e-") as work:
        include = f"--include={','.join(BASE_PACKAGES)}"
        log = layout.cache / "debootstrap.log"
        with log.open("wb") as output:
            command = ["debootstrap", "--variant=minbase", include, SUITE, f"{work}/root"]
            if subprocess.run(command, stdout=output, stderr=output).returncode != 0:
                raise SystemExit(f"debootstrap failed; see {log}")
        context = Path(work) / "context"
        context.mkdir()
        packages = ["--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*"]
        subprocess.run(["tar", "-C", f"{work}/root", *packages, "-cf", context / "base.tar", "."], check=True)
        shutil.copy(CA_BUNDLE, context)
        buildah(layout, "build", "--layers", "--format", "oci", "-f", DOCKERFILES / "base", "-t", name, context)
        with registry.serving(layout) as prefix:
            push(layout, prefix, name)
    return name


def push(layout: Layout, prefix: list[str], name: str) -> None:
    """zstd at its lowest level: the layer with torch has gigabytes."""
    compression = ("--compression-format", "zstd", "--compression-level", "1")
    buildah(layout, "push", "--tls-verify=false", *compression, name, prefix=prefix)


@cache
def project_tag() -> str:
    """Changes with anything that goes into Prism's images."""
    found = (path for source in SOURCES for path in [REPOSITORY / source, *(REPOSITORY / source).rglob("*")])
    files = {path for path in found if path.is_file() and path.parent.name != "__pycache__"}
    return hashlib.sha256(f"{files_digest(files, REPOSITORY)} {base_tag()}".encode()).hexdigest()[:12]


def build(layout: Layout) -> str:
    """Builds Prism's images with `images/build.sh` and puts them into the registry. Returns their tag.

    A second build repeats only the layers above the first that changed; torch has one to itself.
    """
    base_name, tag = base(layout), project_tag()
    missing = [name for name in PROJECT if not registry.holds(layout, f"prism-{name}", tag)]
    if missing:
        settings = {"BUILDER": "buildah", "REGISTRY": REGISTRY, "TAG": tag, "BASE": base_name, "PUSH": ""}
        flags = {"BUILD_FLAGS": "--isolation chroot --network host"}
        for name in missing:
            with phase(f"image {name}"):
                environment = builder_environment(layout) | settings | flags
                subprocess.run([REPOSITORY / "images/build.sh", name], env=environment, check=True)
        with phase("push"), registry.serving(layout) as prefix:
            for name in missing:
                push(layout, prefix, f"{REGISTRY}/prism-{name}:{tag}")
        with phase("earlier images"):
            forget_earlier(layout)
    return tag


def forget_earlier(layout: Layout) -> None:
    """Images of earlier states of the code: they would fill a disk in a few days of changes."""
    kept = project_images()
    for name in buildah(layout, "images", "--format", "{{.Name}}:{{.Tag}}").split():
        if is_projects(name) and name not in kept:
            buildah(layout, "rmi", "--force", name)
    buildah(layout, "rmi", "--prune", "--force")
    for name in PROJECT:
        registry.forget_tags(layout, f"prism-{name}", keep=project_tag())
    registry.collect_garbage(layout)


def is_projects(reference: str) -> bool:
    """Whether it names an image of Prism, of any state of the code."""
    return reference.startswith(tuple(f"{REGISTRY}/prism-{name}:" for name in PROJECT))


def project_images() -> list[str]:
    """References of Prism's images, as the cluster pulls them."""
    return [f"{REGISTRY}/prism-{name}:{project_tag()}" for name in PROJECT]


def environment() -> dict[str, str]:
    """What tests need to know: where images are, as the cluster sees it, and their tags."""
    return {
        "PRISM_E2E_REGISTRY": REGISTRY,
        "PRISM_E2E_TAG": project_tag(),
        "PRISM_E2E_BASE_IMAGE": f"{REGISTRY}/{BASE}:{base_tag()}",
    }
