#!/usr/bin/env bash
# `docker build` by BuildKit alone, as far as build.sh asks for it: an image goes to the file IMAGE. BUILDKIT_HOST: its
# daemon's address. BASE: an OCI layout, and BASE_DIGEST what of it stands for the image localhost/python:3.11.
set -euo pipefail
[ "$1" = build ] && shift
words=()
while [ $# -gt 1 ]; do
  case $1 in
    --file) words+=(--local "dockerfile=$(dirname "$2")") ;;
    --target) words+=(--opt "target=$2") ;;
    --label) words+=(--opt "label:$2") ;;
    --tag) words+=(--output "type=docker,name=$2,dest=$IMAGE") ;;
    *) echo "buildkit.sh: knows no option $1" >&2; exit 2 ;;
  esac
  shift 2
done
exec buildctl build --progress plain --frontend dockerfile.v0 --local "context=$1" "${words[@]}" \
  --opt build-arg:PYTHON_IMAGE=localhost/python:3.11 \
  --oci-layout "base=$BASE" --opt "context:localhost/python:3.11=oci-layout://base@$BASE_DIGEST"
