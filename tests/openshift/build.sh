#!/usr/bin/env bash
# Builds main.go with OpenShift's admission into the directory given: admission, and manifests/, which OpenShift ships. The
# second directory has clones of two repositories of OpenShift, the first with all that it imports: nothing is downloaded.
# GO names the go command, 1.24 or later.
set -euo pipefail
out=$(realpath -m -- "${1:?usage: build.sh DIRECTORY CLONES}")
clones=$(realpath -m -- "${2:?usage: build.sh DIRECTORY CLONES, which is OPENSHIFT=CLONES of make}")
cd "$(dirname "$0")"
here=$PWD
GO=${GO:-go}

# as tried: other commits should do too
for repository in apiserver-library-go@a8019f39f6708878cbb42101693940ed4817ab82 \
  cluster-kube-apiserver-operator@c813e820bb94cf2af88a6343c8554624c334c04c; do
  name=${repository%@*} commit=${repository#*@}
  [ -d "$clones/$name" ] || missing+="
  git clone https://github.com/openshift/$name '$clones/$name' && git -C '$clones/$name' checkout $commit"
done
[ -z "${missing-}" ] || { echo "build.sh: $clones has no clones of OpenShift's repositories. Make them:$missing" >&2; exit 1; }

# shellcheck source=tests/localcluster/go-env.sh
. ../localcluster/go-env.sh
echo "build.sh: building OpenShift's admission: about 3 minutes on 2 cores the first time"
mkdir -p "$out"
(cd "$clones/apiserver-library-go" && "$GO" build -mod=vendor -ldflags='-s -w' -o "$out/admission" "$here/main.go")
ln -sfn "$clones/cluster-kube-apiserver-operator/bindata/bootkube/scc-manifests" "$out/manifests"
