#!/usr/bin/env bash
# Builds the images of the last commit: `build.sh [IMAGE...]`, all of them when none is named.
#
# BUILDER: docker, podman or nerdctl; the first that is there. REPOSITORY: what names begin with. TAG: the version when empty.
# SOURCE: the address of the repository, for a label. BUILD_ARGS: further words for each build.
set -euo pipefail
cd "$(dirname "$0")/../.."

builder=${BUILDER:-}
for each in docker podman nerdctl; do
    [ -n "$builder" ] || builder=$(command -v "$each" || true)
done
if [ -z "$builder" ]; then
    echo "no image is built: there is no docker, podman or nerdctl on PATH; install one, or name yours: make images BUILDER=..." >&2
    exit 2
fi

read -r version <operator/VERSION
revision=$(git rev-parse HEAD)
repository=${REPOSITORY:-colocated-rl}
tag=${TAG:-$version}
read -ra build_args <<<"${BUILD_ARGS:-}"
oci=org.opencontainers.image
labels=(--label "$oci.version=$version" --label "$oci.revision=$revision")
[ -z "${SOURCE:-}" ] || labels+=(--label "$oci.source=$SOURCE")
[ $# -gt 0 ] || set -- operator agent rollout gpu gpu-cpu

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
git archive "$revision" operator workloads tests/engine_cpu | tar -x -C "$context"
git diff --quiet "$revision" -- operator workloads tests/engine_cpu || echo "images are of the last commit: what is changed since is not in them" >&2

for image in "$@"; do
    echo "$repository/$image:$tag: building"
    "$builder" build --file "$context/workloads/images/Dockerfile" --target "$image" --tag "$repository/$image:$tag" \
        --label "$oci.title=$image" "${labels[@]}" ${build_args[@]+"${build_args[@]}"} "$context"
done
