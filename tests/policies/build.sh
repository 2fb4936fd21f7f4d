#!/usr/bin/env bash
# Builds kube-router, which enforces NetworkPolicies by the kernel's packet filter, from its module into bin/ of the
# directory given. GO names the go command, 1.26 or later. Its firewall runs iptables and ipset, which have to be there.
set -euo pipefail
out=$(realpath -m -- "${1:?usage: build.sh DIRECTORY}")
cd "$(dirname "$0")"
GO=${GO:-go}
router=github.com/cloudnativelabs/kube-router/v2@v2.1.0

for program in iptables ipset; do
  command -v $program >/dev/null || {
    echo "build.sh: $program is not on PATH: \`apt-get install --no-install-recommends iptables ipset\`" >&2
    exit 2
  }
done
[ "$(id -u)" = 0 ] || { echo "build.sh: not root, who alone may filter packets" >&2; exit 2; }
[ "$(cat "$out/version" 2>/dev/null)" != "$router" ] || exit 0
# shellcheck source=tests/localcluster/go-env.sh
. ../localcluster/go-env.sh
echo "build.sh: building $router: about 4 minutes on 2 cores the first time"
rm -rf "$out" && mkdir -p "$out/bin"
module_copy $router "$out/source"
(cd "$out/source" && "$GO" build -ldflags='-s -w' -o "$out/bin/kube-router" ./cmd/kube-router)
rm -rf "$out/source"
echo "$router" >"$out/version"
