#!/bin/sh
# Runs one of the GPU's commands in an unpacked kit, on libraries of the kit and, where it has none, of the machine.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/tree"
PYTHONPATH=$here/site:$here/tree:$here/tree/tests:$here/tree/operator
for package in member agent rollout trainer; do PYTHONPATH=$PYTHONPATH:$here/tree/workloads/$package; done
export PYTHONPATH
command=${1:-}
[ $# -eq 0 ] || shift
case $command in
check) exec python3 -m bench.gpu.check "$@" ;;
test-gpu) exec python3 -m pytest -W default -p no:cacheprovider tests/gpu "$@" ;; # warnings of other versions are no failures
bench-gpu) exec python3 -m bench.gpu "$@" ;;
prove-gpu) exec python3 -m bench.gpu.prove "$@" ;;
*) echo "usage: $0 check|test-gpu|bench-gpu|prove-gpu [ARGUMENT...]" >&2; exit 2 ;;
esac
