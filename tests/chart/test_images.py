"""The image recipes: pinned, non-root, torch only where it is used and in one shared layer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from chart_support import CHART, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

IMAGES = ROOT / "images"
RECIPES = sorted(IMAGES.glob("*/Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (IMAGES / "constraints.txt").read_text(), re.MULTILINE)
}


def requirements(extra: str) -> list[Requirement]:
    script = IMAGES / "requirements.py"
    result = subprocess.run([sys.executable, script, extra], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Requirement(line) for line in result.stdout.splitlines()]


def instructions(recipe: Path) -> list[str]:
    """Comments dropped, continued lines joined."""
    text = re.sub(r"^#.*\n", "", recipe.read_text(), flags=re.MULTILINE)
    return [line for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines() if line]


def final_stage(recipe: Path) -> list[str]:
    lines = instructions(recipe)
    last = max(index for index, line in enumerate(lines) if line.startswith("FROM "))
    return lines[last:]


def test_there_is_a_recipe_for_every_image_of_the_chart() -> None:
    assert [recipe.parent.name for recipe in RECIPES] == ["operator", "router", "server", "server-cpu"]
    values = (CHART / "values.yaml").read_text()
    assert set(re.findall(r"repository: (\S+)", values)) == {f"prism-{recipe.parent.name}" for recipe in RECIPES}
    assert f'appVersion: "{PROJECT["version"]}"' in (CHART / "Chart.yaml").read_text()


@pytest.mark.parametrize("extra", ["engine", "operator", "router"])
def test_everything_direct_is_pinned_within_its_range(extra: str) -> None:
    direct = requirements(extra)
    assert direct
    for requirement in direct:
        assert PINS[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize(("name", "needs"), [("operator", "kopf"), ("router", "httptools")])
def test_neither_the_operators_nor_the_routers_image_needs_torch(name: str, needs: str) -> None:
    names = {canonicalize_name(requirement.name) for requirement in requirements(name)}
    assert needs in names
    assert not names & {"torch", "triton", "tokenizers", "safetensors", "transformers"}
    [recipe] = [recipe for recipe in RECIPES if recipe.parent.name == name]
    assert "torch" not in " ".join(instructions(recipe))


def test_both_servers_share_the_layer_of_torch() -> None:
    layers = {}
    for name in ("server", "server-cpu"):
        lines = final_stage(IMAGES / name / "Dockerfile")
        end = next(index for index, line in enumerate(lines) if line.endswith(" torch"))
        layers[name] = lines[: end + 1]
    assert layers["server"] == layers["server-cpu"]
    assert not [line for line in layers["server"] if line.startswith("COPY") and "/torch.txt" not in line]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.parent.name)
def test_images_are_non_root_labelled_and_start_a_script_of_the_project(recipe: Path) -> None:
    lines = final_stage(recipe)
    assert lines[0] == "FROM ${BASE}"
    [user] = [line for line in lines if line.startswith("USER ")]
    assert user == "USER 65532:65532"
    [entry] = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT ")]
    assert json.loads(entry)[0] in PROJECT["scripts"]
    label = next(line for line in lines if line.startswith("LABEL "))
    for key in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{key}=" in label
    runs = [line for line in lines if line.startswith("RUN ")]
    assert all("mount=type=cache" in line for line in runs if "pip install" in line)
    assert all("rm -rf /var/lib/apt/lists" in line for line in runs if "apt-get" in line)


def test_what_copies_take_is_let_through_to_the_build() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    let_through = {line[1:] for line in lines if line.startswith("!")}
    for recipe in RECIPES:
        for line in instructions(recipe):
            if line.startswith("COPY ") and "--from" not in line:
                assert set(line.split()[1:-1]) <= let_through


def test_the_build_script_names_its_images_by_registry_and_tag(tmp_path: Path) -> None:
    log, tool = tmp_path / "log", tmp_path / "buildah"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    tool.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "BUILDER": "buildah",
        "REGISTRY": "registry.example.com/ml",
        "TAG": "7",
        "BASE": "base:1",
        "PUSH": "1",
        "PIP_INDEX_URL": "https://pypi.example.com/simple",
        "BUILD_FLAGS": "--isolation chroot",
    }
    script = IMAGES / "build.sh"
    subprocess.run([script, "operator"], env=environment, cwd=tmp_path, check=True, capture_output=True)
    build, push = log.read_text().splitlines()
    assert "--isolation chroot" in build
    assert "--build-arg BASE=base:1" in build
    assert "--build-arg PIP_INDEX_URL=https://pypi.example.com/simple" in build
    assert build.endswith("--file images/operator/Dockerfile --tag registry.example.com/ml/prism-operator:7 .")
    assert push == "push registry.example.com/ml/prism-operator:7"
    refused = subprocess.run([script, "routers"], env=environment, check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "no such image: routers" in refused.stderr
    assert os.access(script, os.X_OK)
