#!/usr/bin/env bash
# Builds cert-manager's controller into the directory given: bin/, and crds/ with the kinds of a newer release. The
# controller is the newest whose command is in its module: later releases keep their commands apart from it. GO names the
# go command, 1.26 or later.
set -euo pipefail
out=$(realpath -m -- "${1:?usage: build.sh DIRECTORY}")
cd "$(dirname "$0")"
GO=${GO:-go}
module=github.com/cert-manager/cert-manager controller=v1.11.5 kinds=v1.21.2

[ "$(cat "$out/version" 2>/dev/null)" != "$controller $kinds" ] || exit 0
# shellcheck source=tests/localcluster/go-env.sh
. ../localcluster/go-env.sh
echo "build.sh: building cert-manager $controller: about 3 minutes on 2 cores the first time"
rm -rf "$out" && mkdir -p "$out/bin" "$out/crds"

install -m 644 "$(module_folder $module@$kinds)/deploy/crds/"*.yaml "$out/crds/"
module_copy $module@$controller "$out/source"
(cd "$out/source" && "$GO" build -ldflags='-s -w' -o "$out/bin/cert-manager" ./cmd/controller)
rm -rf "$out/source"
echo "$controller $kinds" >"$out/version"
