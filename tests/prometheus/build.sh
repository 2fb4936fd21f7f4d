#!/usr/bin/env bash
# Builds Prometheus' own operator from its module, and beside it the Prometheus whose library that operator has, into the
# directory given: bin/, and bundle.yaml, which installs the operator. GO names the go command, 1.26 or later.
set -euo pipefail
out=$(realpath -m -- "${1:?usage: build.sh DIRECTORY}")
cd "$(dirname "$0")"
GO=${GO:-go}
operator=github.com/prometheus-operator/prometheus-operator prometheus=github.com/prometheus/prometheus
version=v0.92.1

[ "$(cat "$out/version" 2>/dev/null)" != $version ] || exit 0
# shellcheck source=tests/localcluster/go-env.sh
. ../localcluster/go-env.sh
echo "build.sh: building Prometheus' operator $version and Prometheus: about 5 minutes on 2 cores the first time"
rm -rf "$out" && mkdir -p "$out/bin"

module_copy $operator@$version "$out/source"
cd "$out/source"
"$GO" mod edit -dropreplace=$operator/pkg/apis/monitoring -dropreplace=$operator/pkg/client # modules of their own, and not in it
cat "$(module_folder $prometheus)/go.sum" >>go.sum # of what its commands need and its library does not
GOFLAGS="$GOFLAGS -mod=mod" "$GO" build -tags=remove_all_sd,enable_kubernetes_sd -ldflags='-s -w' -o "$out/bin/" \
  $prometheus/cmd/{prometheus,promtool} ./cmd/{operator,prometheus-config-reloader}
mv bundle.yaml "$out/"
rm -rf "$out/source"
echo $version >"$out/version"
