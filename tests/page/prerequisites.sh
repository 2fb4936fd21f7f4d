#!/usr/bin/env bash
# Names what this machine lacks for the page's tests, before anything is set up.
set -euo pipefail

if ! command -v chromium >/dev/null; then
  echo "not on PATH: chromium: \`apt-get install --no-install-recommends chromium\`" >&2
  exit 2
fi
