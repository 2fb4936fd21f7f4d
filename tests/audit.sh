#!/usr/bin/env bash
# Compares every pinned library with PyPI's database of known vulnerabilities: audit.sh UV FILE...
# Ends with 1 if one is known, and with 2 if the database has not answered for some, which are then named.
set -euo pipefail
uv=${1:?usage: audit.sh UV REQUIREMENT-FILE...}
tools=$(dirname "$0")/audit/requirements.txt
shift
found=$(mktemp)
trap 'rm -f "$found"' EXIT
code=0
for file in "$@"; do
  echo "== $file: $(grep -c '==' "$file") libraries"
  "$uv" run --quiet --no-project --with-requirements "$tools" pip-audit --requirement "$file" --require-hashes --no-deps --disable-pip --progress-spinner off \
    >"$found" || code=1
  cat "$found"
  if grep -q 'could not be audited' "$found"; then
    echo "== $file: the database did not answer for $(grep -c 'could not be audited' "$found") of them"
    [ "$code" = 1 ] || code=2
  fi
done
exit "$code"
