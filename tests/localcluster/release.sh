#!/usr/bin/env bash
# Builds the programs of another release of Kubernetes into the directory given, for `localcluster up --kubernetes`: from its
# module, with the libraries and hashes of its own go.mod and go.sum. GO names the go command, 1.26 or later.
set -euo pipefail
asked=${1:?usage: release.sh 1.MINOR DIRECTORY, or 1.MINOR.PATCH} out=$(realpath -m -- "${2:?usage: release.sh 1.MINOR DIRECTORY}")
cd "$(dirname "$0")"
GO=${GO:-go}
case $asked in # the releases that docs/proven.md names
  1.33) kubernetes=1.33.13 ;;
  1.34) kubernetes=1.34.4 ;;
  1.35) kubernetes=1.35.4 ;;
  1.*.*) kubernetes=$asked ;;
  *) echo "release.sh: no release is known for '$asked': name one as 1.36.3" >&2; exit 2 ;;
esac

[ "$("$out/kubelet" --version 2>/dev/null)" != "Kubernetes v$kubernetes" ] || exit 0
# shellcheck source=tests/localcluster/go-env.sh
. ./go-env.sh
echo "release.sh: building Kubernetes $kubernetes: about 5 minutes on 2 cores the first time"
rm -rf "$out" && mkdir -p "$out/new"
module_copy "k8s.io/kubernetes@v$kubernetes" "$out/source"
cd "$out/source"
# what a checkout of Kubernetes has in staging/ is not in its module: each is a module of its own, of the same release
rm go.work go.work.sum
sed -i -E "s|=> \./staging/src/(k8s\.io/.*)|=> \1 v0.${kubernetes#1.}|" go.mod
flags=$(linker_flags "$kubernetes")
# -mod=mod: the hashes of these modules are those of Go's checksum database
GOGC=off GOMEMLIMIT=2GiB "$GO" build -mod=mod -ldflags="$flags" -o "$out/new/" \
  ./cmd/{kube-apiserver,kube-controller-manager,kube-scheduler,kubelet,kube-proxy}
mv "$out"/new/* "$out"
rm -r "$out/new" "$out/source"
