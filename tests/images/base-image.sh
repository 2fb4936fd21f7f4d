#!/usr/bin/env bash
# Makes a stand-in for the Python base image, as a root file system in the file given: Debian 12 and its own Python 3.11, where
# the Dockerfile's has a newer Debian and a Python of its own. Debian's package servers are asked, and no registry.
set -euo pipefail
out=$(realpath -m -- "${1:?usage: base-image.sh FILE}")

[ ! -e "$out" ] || exit 0
echo "base-image.sh: making a root file system of Debian's packages, 190 MB: about a minute the first time"
mkdir -p "$(dirname "$out")"
draft=$(mktemp --suffix=.tar "$out.XXXX")
trap 'rm -f "$draft"' EXIT
without=()
for each in doc man locale; do
    without+=("--dpkgopt=path-exclude=/usr/share/$each/*")
done
# shellcheck disable=SC2016 # $1 is the root of what is made
mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-pip "${without[@]}" \
    --customize-hook='rm "$1"/usr/lib/python3*/EXTERNALLY-MANAGED' \
    --customize-hook='ln -s /usr/bin/python3 /usr/bin/pip "$1/usr/local/bin/"' \
    bookworm "$draft"
mv "$draft" "$out"
