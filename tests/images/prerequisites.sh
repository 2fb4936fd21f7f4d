#!/usr/bin/env bash
# Names what this machine lacks for building images and running containers of them, before anything is downloaded.
set -euo pipefail
cd "$(dirname "$0")"

declare -A packages=([podman]=podman [runc]=runc [mmdebstrap]=mmdebstrap [nft]=nftables)
missing=()
for program in "${!packages[@]}"; do
  command -v "$program" >/dev/null || missing+=("${packages[$program]}")
done
lacking=0
if [ ${#missing[@]} -gt 0 ]; then
  echo "not on PATH: programs of ${missing[*]}: \`apt-get install --no-install-recommends ${missing[*]}\`" >&2
  lacking=2
fi
[ "$(id -u)" = 0 ] || { echo "not root: containers here are made by root" >&2; lacking=2; }
read -r kib < <(df --output=avail . | tail -n 1)
((kib >= 25 << 20)) || { echo "disk: $((kib >> 20)) GiB free, 25 needed for images and what containers run of them" >&2; lacking=2; }
exit $lacking
