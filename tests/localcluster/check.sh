#!/usr/bin/env bash
# Form, likely bugs and unit tests of the Go code. With build.sh's settings, so that what that has compiled is not compiled
# again: it comes first. GO names the go command.
set -euo pipefail
cd "$(dirname "$0")"
GO=${GO:-go}
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS="-mod=readonly -trimpath"
form=$("$("$GO" env GOROOT)/bin/gofmt" -l .)
if [[ $form ]]; then
  printf 'gofmt -w these files:\n%s\n' "$form" >&2
  exit 1
fi
"$GO" vet ./...
"$GO" test ./...
