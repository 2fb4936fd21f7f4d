# shellcheck shell=bash
# Sourced by whatever runs go here: with the same flags, all of it shares the compiled packages.
# No debugging data, and packages rather than parts of one are compiled side by side: a fifth less work.
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS="-mod=readonly -trimpath '-gcflags=all=-dwarf=false -c=1'"

# linker_flags RELEASE, as 1.36.3: without the version in them, helm and kubectl can't parse the server's
linker_flags() {
  local major minor version=k8s.io/component-base/version
  IFS=. read -r major minor _ <<<"$1"
  echo "-s -w -X $version.gitVersion=v$1 -X $version.gitMajor=$major -X $version.gitMinor=$minor -X $version.gitTreeState=clean"
}
