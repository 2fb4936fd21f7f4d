#!/usr/bin/env bash
# Builds containerd, its shim and ctr, CNI plugins, CoreDNS, BuildKit and a pause program into bin/ of the directory given, from
# go.mod and go.sum as they stand. GO names the go command, 1.26 or later.
set -euo pipefail
out=$(realpath -m -- "${1:?usage: build.sh DIRECTORY}")
cd "$(dirname "$0")"
GO=${GO:-go}

# shellcheck source=tests/localcluster/go-env.sh
. ../localcluster/go-env.sh
inputs=$(cat go.mod go.sum pause/*.go | sha256sum)
[ "$(cat "$out/inputs" 2>/dev/null)" != "$inputs" ] || exit 0
echo "build.sh: building containerd, CoreDNS and BuildKit from their modules: about 10 minutes on 2 cores the first time"
mkdir -p "$out/bin"
GOGC=off GOMEMLIMIT=2GiB "$GO" build -ldflags='-s -w' -o "$out/bin/" tool ./pause
echo "$inputs" >"$out/inputs"
