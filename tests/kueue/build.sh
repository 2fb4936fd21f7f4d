#!/usr/bin/env bash
# Builds Kueue's own manager from its module, into the directory given: bin/kueue, and config/ with its CRDs and webhooks.
# GO names the go command, 1.26 or later.
set -euo pipefail
out=$(realpath -m -- "${1:?usage: build.sh DIRECTORY}")
cd "$(dirname "$0")"
GO=${GO:-go}
version=v0.19.0

[ "$(cat "$out/version" 2>/dev/null)" != $version ] || exit 0
# shellcheck source=tests/localcluster/go-env.sh
. ../localcluster/go-env.sh
echo "build.sh: building Kueue $version: 3 to 10 minutes on 2 cores the first time"
rm -rf "$out" && mkdir -p "$out/bin"
module_copy sigs.k8s.io/kueue@$version "$out/source"
(cd "$out/source" && GOGC=off GOMEMLIMIT=2GiB "$GO" build -ldflags='-s -w' -o "$out/bin/kueue" ./cmd/kueue)
mv "$out/source/config" "$out/config"
rm -rf "$out/source"
echo $version >"$out/version"
