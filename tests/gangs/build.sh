#!/usr/bin/env bash
# Builds the scheduler of scheduler-plugins from its module, into the directory given: bin/, and crds/ with its kinds and
# those of Volcano and cert-manager. GO names the go command, 1.26 or later.
set -euo pipefail
out=$(realpath -m -- "${1:?usage: build.sh DIRECTORY}")
cd "$(dirname "$0")"
GO=${GO:-go}
plugins=sigs.k8s.io/scheduler-plugins@v0.33.5 volcano=volcano.sh/volcano@v1.14.1
certificates=github.com/cert-manager/cert-manager@v1.21.2
version="$plugins $volcano $certificates"

[ "$(cat "$out/version" 2>/dev/null)" != "$version" ] || exit 0
# shellcheck source=tests/localcluster/go-env.sh
. ../localcluster/go-env.sh
echo "build.sh: building a scheduler: about 10 minutes on 2 cores the first time"
rm -rf "$out" && mkdir -p "$out/bin" "$out/crds"

source_of() { # a module: a copy that may be written to
  local found
  found=$("$GO" mod download -json "$1") || { echo "$found" >&2; exit 1; }
  cp -r "$(sed -n 's/^\t"Dir": "\(.*\)",$/\1/p' <<<"$found")" "$out/source"
  chmod -R u+w "$out/source"
}

source_of $certificates
cp "$out/source/deploy/crds/cert-manager.io_"{certificates,issuers}.yaml "$out/crds/"
rm -rf "$out/source"

source_of $plugins
cp "$out/source/config/crd/bases/scheduling.x-k8s.io_podgroups.yaml" "$out/crds/"
(cd "$out/source" && "$GO" build -ldflags='-s -w' -o "$out/bin/coscheduling" ./cmd/scheduler)
rm -rf "$out/source"

source_of $volcano
cp "$out/source/config/crd/volcano/bases/scheduling.volcano.sh_podgroups.yaml" "$out/crds/"
rm -rf "$out/source"
echo "$version" >"$out/version"
