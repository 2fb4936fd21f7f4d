#!/usr/bin/env bash
# Builds the scheduler of scheduler-plugins, and scheduler and controllers of Volcano, from their modules, into the
# directory given: bin/, and crds/ with their kinds. GO names the go command, 1.26 or later.
set -euo pipefail
out=$(realpath -m -- "${1:?usage: build.sh DIRECTORY}")
cd "$(dirname "$0")"
GO=${GO:-go}
plugins=sigs.k8s.io/scheduler-plugins@v0.33.5
volcano=volcano.sh/volcano@v1.14.1 kinds_of_volcano=volcano.sh/apis@v1.14.0
version="$plugins $volcano $kinds_of_volcano"

[ "$(cat "$out/version" 2>/dev/null)" != "$version" ] || exit 0
# shellcheck source=tests/localcluster/go-env.sh
. ../localcluster/go-env.sh
echo "build.sh: building two schedulers: about 15 minutes on 2 cores the first time"
rm -rf "$out" && mkdir -p "$out/bin" "$out/crds"

module_copy $plugins "$out/source"
cp "$out/source/config/crd/bases/scheduling.x-k8s.io_podgroups.yaml" "$out/crds/"
(cd "$out/source" && "$GO" build -ldflags='-s -w' -o "$out/bin/coscheduling" ./cmd/scheduler)
rm -rf "$out/source"

module_copy $volcano "$out/source"
cp "$out/source/config/crd/"{volcano,jobflow}/bases/*.yaml "$out/crds/"
(
  cd "$out/source"
  "$GO" mod edit -replace="${kinds_of_volcano%@*}=$kinds_of_volcano" # a folder of its repository, which its module lacks
  for part in scheduler controller-manager; do
    GOFLAGS="$GOFLAGS -mod=mod" "$GO" build -ldflags='-s -w' -o "$out/bin/volcano-$part" ./cmd/$part
  done
)
rm -rf "$out/source"
echo "$version" >"$out/version"
