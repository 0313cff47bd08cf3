#!/usr/bin/env bash
# Installs from the distribution what the cluster needs, where it is missing. Debian's names; their services stay unused.
set -euo pipefail

declare -A package=(
  [runc]=runc [iptables]=iptables [conntrack]=conntrack [ipset]=ipset [socat]=socat [ip]=iproute2
  [debootstrap]=debootstrap [buildah]=buildah [docker-registry]=docker-registry [openssl]=openssl
  [/usr/lib/cni/bridge]=containernetworking-plugins
)
missing=()
for program in "${!package[@]}"; do
  command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "these packages are needed, by their names in Debian: ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
