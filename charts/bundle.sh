#!/usr/bin/env bash
# Prints the chart as plain manifests, for `kubectl apply -f`: `bundle.sh helm`, or whatever runs Helm. Hooks are
# not in it: without Helm nobody runs them.
set -euo pipefail
namespace=${NAMESPACE:-colocated-rl-system}
cat <<MANIFEST
# Made by \`make bundle\` from charts/colocated-rl. kubectl apply -f installs and upgrades it.
apiVersion: v1
kind: Namespace
metadata:
  name: "$namespace"
  labels: {pod-security.kubernetes.io/enforce: restricted}
MANIFEST
exec "$@" template colocated-rl "$(dirname "$0")/colocated-rl" --namespace "$namespace" --no-hooks
