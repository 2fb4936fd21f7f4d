package box

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// enterRoot makes the container's root and moves this process into it. What the container writes outside of volumes goes to
// a tmpfs that ends with its mount namespace; the image is never written to, and nothing of it is copied.
func enterRoot(s *Spec) error {
	if err := mount("follow the node's mounts", "", "/", "", syscall.MS_REC|syscall.MS_SLAVE, ""); err != nil {
		return err
	}
	if err := mount("scratch", "tmpfs", s.Scratch, "tmpfs", 0, "mode=0755"); err != nil {
		return err
	}
	upper, work, root := s.Scratch+"/upper", s.Scratch+"/work", s.Scratch+"/root"
	for _, d := range []string{upper, work, root} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	build := overlay
	if InUserNamespace {
		build = assemble
	}
	if err := build(s, upper, work, root); err != nil {
		return err
	}
	own, err := deviceNumbers(s.Scratch, root)
	if err != nil {
		return err
	}
	if err := mountDevices(root, s); err != nil {
		return err
	}
	if err := mountKernel(root, s); err != nil {
		return err
	}
	for _, m := range shallowFirst(s.Binds) {
		if err := bind(root, m); err != nil {
			return err
		}
		if err := openParents(root, m.Target, own); err != nil {
			return err
		}
	}
	for _, m := range shallowFirst(s.Mounts) {
		if err := bind(root, m); err != nil {
			return err
		}
	}
	if dir, err := within(root, workingDirectory(s.Dir)); err != nil {
		return err
	} else if err := place(dir, true); err != nil {
		return fmt.Errorf("working directory %s: %w", s.Dir, err)
	}
	if s.ReadonlyRoot {
		if err := mount("read-only root", "", root, "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_RDONLY, ""); err != nil {
			return err
		}
	}
	return pivot(root)
}

// pivot rather than chroot, so that the machine's own tree is gone from the container's mount namespace.
func pivot(root string) error {
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := syscall.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := syscall.Unmount(".", syscall.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount old root: %w", err)
	}
	return os.Chdir("/")
}

func overlay(s *Spec, upper, work, root string) error {
	for _, d := range outermost(s.Hide) {
		if err := makeOpaque(s.Root, upper, d); err != nil {
			return fmt.Errorf("hide %s: %w", d, err)
		}
	}
	return mount("overlay", "overlay", root, "overlay", 0, "lowerdir="+s.Root+",upperdir="+upper+",workdir="+work)
}

// outermost leaves out the directories that lie below another of the list.
func outermost(dirs []string) (out []string) {
	sorted := slices.Clone(dirs)
	for i, d := range sorted {
		sorted[i] = filepath.Clean(d)
	}
	slices.Sort(sorted) // a directory sorts before what is below it
	for _, d := range sorted {
		if !slices.ContainsFunc(out, func(above string) bool { return d == above || strings.HasPrefix(d, above+"/") }) {
			out = append(out, d)
		}
	}
	return out
}

// makeOpaque makes dir look empty through the overlay, its parents unchanged.
func makeOpaque(lower, upper, dir string) error {
	at, seen := upper, lower
	parts := strings.Split(strings.Trim(dir, "/"), "/")
	for i, part := range parts {
		at, seen = filepath.Join(at, part), filepath.Join(seen, part)
		var st syscall.Stat_t
		if err := syscall.Lstat(seen, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			return nil // not there, or a link: what it leads to is hidden under its own name
		}
		if err := os.Mkdir(at, 0o755); err == nil {
			if err := errors.Join(os.Chown(at, int(st.Uid), int(st.Gid)), syscall.Chmod(at, st.Mode&0o7777)); err != nil {
				return err
			}
		} else if !errors.Is(err, os.ErrExist) {
			return err
		}
		if i == len(parts)-1 {
			return syscall.Setxattr(at, "trusted.overlay.opaque", []byte("y"), 0)
		}
	}
	return nil
}

// assemble is for a user namespace, where a directory with mounts of others below it can't be an overlay's lower one: it
// makes a root of the user's own, with each directory of the image in it, through an overlay where that is allowed.
func assemble(s *Spec, upper, work, root string) error {
	if err := mount("root", root, root, "", syscall.MS_BIND, ""); err != nil {
		return err
	}
	for _, m := range append(slices.Clone(s.Binds), s.Mounts...) {
		if err := ownParents(s.Root, upper, m.Target); err != nil {
			return fmt.Errorf("directories above %s: %w", m.Target, err)
		}
	}
	entries, err := os.ReadDir(s.Root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		from, to := filepath.Join(s.Root, e.Name()), filepath.Join(root, e.Name())
		switch {
		case e.Type()&os.ModeSymlink != 0:
			if link, err := os.Readlink(from); err != nil {
				return err
			} else if err := os.Symlink(link, to); err != nil {
				return err
			}
		case e.IsDir():
			if err := assembleDirectory(e.Name(), from, to, upper, work); err != nil {
				return err
			}
		}
	}
	for _, d := range outermost(s.Hide) {
		var st syscall.Stat_t
		if err := syscall.Stat(root+d, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			continue // not there
		}
		if err := mount("hide", "tmpfs", root+d, "tmpfs", 0, fmt.Sprintf("mode=%o", st.Mode&0o7777)); err != nil {
			return err
		}
	}
	return nil
}

// ownParents makes the directories above a mount point the user's own, with what they hold: in a user namespace those of the
// machine's root are nobody's, and a mount point that they lack could not be made in them.
func ownParents(lower, upper, target string) error {
	path, err := within(lower, target)
	if err != nil {
		return err
	}
	above, err := filepath.Rel(lower, filepath.Dir(path))
	if err != nil {
		return err
	}
	for _, part := range strings.Split(above, "/") {
		lower, upper = filepath.Join(lower, part), filepath.Join(upper, part)
		var st syscall.Stat_t
		if err := syscall.Lstat(lower, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			return nil // not there: whoever makes it owns it
		}
		if err := os.Mkdir(upper, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		if err := syscall.Chmod(upper, st.Mode&0o7777); err != nil {
			return err
		}
	}
	return nil
}

func assembleDirectory(name, from, to, upper, work string) error {
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	switch name {
	case "proc", "sys", "dev", "run", "mnt", "lost+found":
		return nil
	case "tmp":
		return syscall.Chmod(to, 0o1777) // os.Chmod takes no sticky bit by number
	}
	u, w := filepath.Join(upper, name), filepath.Join(work, name)
	if err := errors.Join(os.MkdirAll(u, 0o755), os.Mkdir(w, 0o755)); err != nil {
		return err
	}
	if mount("overlay", "overlay", to, "overlay", 0, "lowerdir="+from+",upperdir="+u+",workdir="+w+",userxattr") == nil {
		return nil
	}
	return mount("bind", from, to, "", syscall.MS_BIND|syscall.MS_REC, "")
}
