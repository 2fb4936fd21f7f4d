#!/usr/bin/env bash
# Makes what a release has beside images, of what the set-up has built: dist.sh UV LOCALCLUSTER DIRECTORY BUILDER
set -euo pipefail
uv=${1:?usage: dist.sh UV LOCALCLUSTER DIRECTORY BUILDER} localcluster=$2 into=$3 builder=$4
root=$(cd "$(dirname "$0")/../.." && pwd)
release=("$uv" run --quiet --no-project --with-requirements "$root/tests/release/requirements.txt")

rm -rf "$into"
mkdir -p "$into"
cp "$root"/.build/wheels/{operator,operator-cli,workloads-*}/*/*.whl "$into/"
"$localcluster" helm package "$root/charts/colocated-rl" --destination "$into"
"$root/charts/bundle.sh" "$localcluster" helm >"$into/colocated-rl.yaml"
bill() { # FILE PINS...: an SBOM of pinned libraries, with the hashes that they are installed by
  local file=$1
  shift
  cat "$@" | "${release[@]}" cyclonedx-py requirements --output-reproducible --output-file "$into/$file" -
}
bill operator.cdx.json "$root/operator/requirements.txt"
bill agent.cdx.json "$root/workloads/agent/requirements.txt"
bill rollout.cdx.json "$root/workloads/rollout/requirements.txt"
bill gpu-cpu.cdx.json "$root"/workloads/gpu/{requirements,engine}.txt
(cd "$into" && sha256sum -- *.* >SHA256SUMS && cat SHA256SUMS)
PYTHONPATH="$root/tests" "${release[@]}" python -m release describe "$into" --builder "$builder"
