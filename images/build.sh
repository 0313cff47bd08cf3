#!/usr/bin/env bash
# Builds Prism's images with whichever of docker, buildah and podman works here; settings are variables.
#   images/build.sh                               the four images, as prism-server:<version> and so on
#   images/build.sh operator server-cpu           only these
#   REGISTRY=registry.example.com/ml TAG=1.2 PUSH=1 images/build.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml | head -1)
REGISTRY=${REGISTRY:-}          # prefix of the names; empty: names without a registry
TAG=${TAG:-$version}
BASE=${BASE:-python:3.11-slim-bookworm}
PUSH=${PUSH:-}                  # not empty: push what was built
BUILD_FLAGS=${BUILD_FLAGS:-}    # for example: --isolation chroot --network host
PUSH_FLAGS=${PUSH_FLAGS:-}      # for example: --tls-verify=false

usable() { command -v "$1" >/dev/null && { [ "$1" != docker ] || docker info >/dev/null 2>&1; }; }
if [ -z "${BUILDER:-}" ]; then
    for tool in docker buildah podman; do usable "$tool" && BUILDER=$tool && break; done
fi
[ -n "${BUILDER:-}" ] || { echo "images/build.sh needs docker (running), buildah or podman" >&2; exit 1; }

arguments=(--build-arg "BASE=$BASE" --build-arg "VERSION=$version"
    --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)")
# Where pip finds packages, when it is not PyPI. TORCH_INDEX_URL: a further index, such as the one of CPU builds.
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_CERT TORCH_INDEX_URL; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done
read -ra build_flags <<<"$BUILD_FLAGS"
read -ra push_flags <<<"$PUSH_FLAGS"

build() {
    case $BUILDER in
        docker) DOCKER_BUILDKIT=1 docker build "$@" ;;
        buildah) buildah build --layers --format oci "$@" ;;
        podman) podman build --layers --format oci "$@" ;;
    esac
}

[ $# -gt 0 ] || set -- server server-cpu router operator
for name in "$@"; do
    [ -f "images/$name/Dockerfile" ] || { echo "no such image: $name (server, server-cpu, router, operator)" >&2; exit 2; }
    reference="${REGISTRY:+$REGISTRY/}prism-$name:$TAG"
    echo "building $reference with $BUILDER on $BASE"
    build "${build_flags[@]}" "${arguments[@]}" --file "images/$name/Dockerfile" --tag "$reference" .
    [ -z "$PUSH" ] || "$BUILDER" push "${push_flags[@]}" "$reference"
done
