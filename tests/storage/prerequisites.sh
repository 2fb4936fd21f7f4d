#!/usr/bin/env bash
# Names what this machine lacks for volumes that are file systems of their own, before a cluster is made.
set -euo pipefail

lacking=0
lacks() {
  echo "$1" >&2
  lacking=2
}
if ! { command -v mkfs.xfs && command -v xfs_growfs; } >/dev/null; then
  lacks "not on PATH: mkfs.xfs, xfs_growfs: \`apt-get install --no-install-recommends xfsprogs\`"
fi
if ! { command -v rclone && command -v fusermount3; } >/dev/null; then
  lacks "not on PATH: rclone, fusermount3: \`apt-get install --no-install-recommends rclone fuse3\`"
fi
if [ "$(id -u)" != 0 ]; then
  lacks "not root: root alone may mount"
fi
for device in /dev/loop-control /dev/fuse; do
  if ! [ -c "$device" ]; then
    lacks "no $device: load the kernel's module (modprobe loop fuse)"
  fi
done
if ! grep -qw xfs /proc/filesystems; then
  lacks "the kernel knows no XFS: modprobe xfs"
fi
exit $lacking
