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

folder_of() { # a version
  local found
  found=$("$GO" mod download -json "$module@$1") || { echo "$found" >&2; exit 1; }
  sed -n 's/^\t"Dir": "\(.*\)",$/\1/p' <<<"$found"
}

install -m 644 "$(folder_of $kinds)/deploy/crds/"*.yaml "$out/crds/"
cp -r "$(folder_of $controller)" "$out/source" # its own go.sum, in a directory that may be written to
chmod -R u+w "$out/source"
(cd "$out/source" && "$GO" build -ldflags='-s -w' -o "$out/bin/cert-manager" ./cmd/controller)
rm -rf "$out/source"
echo "$controller $kinds" >"$out/version"
