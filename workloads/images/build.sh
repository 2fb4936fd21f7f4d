#!/usr/bin/env bash
# Builds the images of the last commit: `build.sh [IMAGE...]`, all of them when none is named.
#
# BUILDER: docker, podman or nerdctl; the first that is there. REPOSITORY: what names begin with. TAG: the version when empty.
# BUILD_ARGS: further words for each build.
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
repository=${REPOSITORY:-colocated-rl}
tag=${TAG:-$version}
read -ra build_args <<<"${BUILD_ARGS:-}"
[ $# -gt 0 ] || set -- operator agent rollout gpu gpu-cpu

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
git archive HEAD operator workloads tests/engine_cpu | tar -x -C "$context"
git diff --quiet HEAD -- operator workloads tests/engine_cpu || echo "images are of the last commit: what is changed since is not in them" >&2

for image in "$@"; do
    echo "$repository/$image:$tag: building"
    "$builder" build --file "$context/workloads/images/Dockerfile" --target "$image" --tag "$repository/$image:$tag" \
        --label "org.opencontainers.image.version=$version" --label "org.opencontainers.image.title=$image" \
        ${build_args[@]+"${build_args[@]}"} "$context"
done
