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

# module_folder MODULE@VERSION: where go keeps its files, which nobody may write to
module_folder() {
  local found
  found=$("$GO" mod download -json "$1") || { echo "$found" >&2; return 1; }
  sed -n 's/^\t"Dir": "\(.*\)",$/\1/p' <<<"$found"
}

# module_copy MODULE@VERSION DIRECTORY: its files, and its own go.sum, where they may be written to
module_copy() {
  local folder
  folder=$(module_folder "$1") || return 1
  cp -r "$folder" "$2"
  chmod -R u+w "$2"
}
