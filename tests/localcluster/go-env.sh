# shellcheck shell=sh
# Sourced by whatever runs go here: with the same flags, all of it shares the compiled packages.
# No debugging data, and packages rather than parts of one are compiled side by side: a fifth less work.
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS="-mod=readonly -trimpath '-gcflags=all=-dwarf=false -c=1'"
