package box

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

func mount(what, source, target, kind string, flags uintptr, data string) error {
	if err := syscall.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", what, target, err)
	}
	return nil
}

// shallowFirst orders mounts so that one below another comes after it, whatever order they were given in.
func shallowFirst(mounts []Mount) []Mount {
	depth := func(m Mount) int { return strings.Count(filepath.Clean(m.Target), "/") }
	out := slices.Clone(mounts)
	slices.SortStableFunc(out, func(a, b Mount) int { return depth(a) - depth(b) })
	return out
}

func bind(root string, m Mount) error {
	target, err := within(root, m.Target)
	if err != nil {
		return err
	}
	st, err := os.Stat(m.Source)
	if err != nil {
		return fmt.Errorf("what is to be mounted on %s: %w", m.Target, err)
	}
	if err := place(target, st.IsDir()); err != nil {
		return fmt.Errorf("mount point %s: %w", m.Target, err)
	}
	if err := mount(m.Source, m.Source, target, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
		return err
	}
	if !m.Propagate {
		if err := mount("private", "", target, "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
			return err
		}
	}
	if m.Readonly {
		return makeReadonly(target)
	}
	return nil
}

// makeReadonly makes a tree of mounts read-only, those below it too.
func makeReadonly(target string) error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	err := unix.MountSetattr(unix.AT_FDCWD, target, unix.AT_RECURSIVE, &attr)
	if err == unix.ENOSYS { // before Linux 5.12
		err = syscall.Mount("", target, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
	}
	if err != nil {
		return fmt.Errorf("make %s read-only: %w", target, err)
	}
	return nil
}

// openParents lets every user pass through the directories above an image's bind, as an image's own files could be reached
// whoever the pod runs as. It touches only directories of the container's own file systems (own), never through a mount.
func openParents(root, target string, own map[uint64]bool) error {
	path, err := within(root, target)
	if err != nil {
		return err
	}
	for dir := filepath.Dir(path); len(dir) > len(root); dir = filepath.Dir(dir) {
		var st syscall.Stat_t
		if err := syscall.Stat(dir, &st); err != nil {
			return err
		}
		const enter = 0o111 // of all three: whoever is in the directory's group is asked for the group's right alone
		if !own[st.Dev] || st.Mode&enter == enter {
			continue
		}
		// EPERM: the directory is of a user that this user namespace does not have, so nobody can change it
		if err := syscall.Chmod(dir, st.Mode&0o7777|enter); err != nil && !(InUserNamespace && err == syscall.EPERM) {
			return fmt.Errorf("let every user into %s: %w", dir, err)
		}
	}
	return nil
}

// deviceNumbers of the container's own file systems: the scratch one and the overlays at root and right below it.
func deviceNumbers(scratch, root string) (map[uint64]bool, error) {
	const overlayMagic = 0x794c7630
	own := map[uint64]bool{}
	add := func(path string) error {
		var st syscall.Stat_t
		if err := syscall.Stat(path, &st); err != nil {
			return err
		}
		own[st.Dev] = true
		return nil
	}
	if err := add(scratch); err != nil {
		return nil, err
	}
	if !InUserNamespace {
		return own, add(root)
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		var fs syscall.Statfs_t
		path := filepath.Join(root, e.Name())
		if e.IsDir() && syscall.Statfs(path, &fs) == nil && fs.Type == overlayMagic {
			if err := add(path); err != nil {
				return nil, err
			}
		}
	}
	return own, nil
}

// within resolves the links of path as the container would (/var/run is often a link to /run), never leaving root.
func within(root, path string) (string, error) {
	at, rest := "/", strings.Split(path, "/")
	for hops := 0; len(rest) > 0; {
		next := filepath.Join(at, rest[0])
		rest = rest[1:]
		to, err := os.Readlink(root + next)
		if err != nil {
			at = next // not a link, or not there yet
			continue
		}
		if hops++; hops > 40 {
			return "", fmt.Errorf("%s: too many links", path)
		}
		if filepath.IsAbs(to) {
			at = "/"
		}
		rest = append(strings.Split(to, "/"), rest...)
	}
	return filepath.Join(root, at), nil
}

// place makes sure that there is something of the right kind to mount on.
func place(path string, dir bool) error {
	if st, err := os.Stat(path); err == nil && st.IsDir() == dir {
		return nil
	}
	if dir {
		return os.MkdirAll(path, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	return f.Close()
}
