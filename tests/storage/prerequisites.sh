#!/usr/bin/env bash
# Names what this machine lacks for volumes that are file systems of their own, before a cluster is made.
set -euo pipefail

lacking=0
command -v mkfs.xfs >/dev/null && command -v xfs_growfs >/dev/null ||
  { echo "not on PATH: mkfs.xfs, xfs_growfs: \`apt-get install --no-install-recommends xfsprogs\`" >&2; lacking=2; }
[ "$(id -u)" = 0 ] || { echo "not root: root alone may mount" >&2; lacking=2; }
for device in /dev/loop-control /dev/fuse; do
  [ -c "$device" ] || { echo "no $device: load the kernel's module (modprobe loop fuse)" >&2; lacking=2; }
done
grep -qw xfs /proc/filesystems || { echo "the kernel knows no XFS: modprobe xfs" >&2; lacking=2; }
exit $lacking
