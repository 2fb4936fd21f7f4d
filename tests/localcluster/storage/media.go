package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

const (
	// SizedClass gives a claim a file system of its own, as large as asked for. It can be expanded.
	SizedClass = "sized"
	// NetworkClass gives a claim a file system in user space, as those of a network are for the kernel. Size is not enforced.
	NetworkClass = "network"

	medium     = "medium" // parameter of a StorageClass, and annotation of its volumes
	mediumFile = "file"   // XFS in a file, as it grows while mounted without more than an administrator's rights; at least 300 MiB
	mediumFUSE = "fuse"   // FUSE over a directory

	imageSuffix = ".xfs"
	dataSuffix  = ".data"
)

// mounts keeps what is mounted where: a volume's path is empty below its mount.
type mounts struct{ servers map[string]*fuse.Server }

// file mounts the file system of this size at a path, made the first time, and grown where it was smaller.
func (m *mounts) file(path string, bytes int64) error {
	image := path + imageSuffix
	st, err := os.Stat(image)
	if errors.Is(err, os.ErrNotExist) {
		if err := makeImage(image, bytes); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	if err := os.MkdirAll(path, 0o777); err != nil {
		return err
	}
	if mounted, err := isMounted(path); err != nil {
		return err
	} else if !mounted {
		if err := run("mount", "-o", "loop", image, path); err != nil {
			return err
		}
	}
	if st != nil && st.Size() < bytes {
		if err := grow(image, path, bytes); err != nil {
			return err
		}
	}
	return os.Chmod(path, 0o777)
}

// makeImage writes a file system into a file that appears whole.
func makeImage(image string, bytes int64) error {
	draft := image + ".new"
	f, err := os.OpenFile(draft, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(bytes), f.Close()); err != nil {
		return err
	}
	if err := run("mkfs.xfs", "-q", draft); err != nil {
		return err
	}
	return os.Rename(draft, image)
}

// grow lets a mounted file system have a larger file.
func grow(image, path string, bytes int64) error {
	if err := os.Truncate(image, bytes); err != nil {
		return err
	}
	device, err := output("losetup", "--noheadings", "--output", "NAME", "--associated", image)
	if err != nil {
		return err
	}
	if err := run("losetup", "--set-capacity", device); err != nil {
		return err
	}
	return run("xfs_growfs", path)
}

// inUserSpace serves a directory beside the path at the path, by this process, until it ends.
func (m *mounts) inUserSpace(path string) error {
	if m.servers[path] != nil {
		return nil
	}
	if err := unmount(path); err != nil { // what a process that is gone has mounted
		return err
	}
	data := path + dataSuffix
	for _, d := range []string{path, data} {
		if err := os.MkdirAll(d, 0o777); err != nil {
			return err
		}
	}
	if err := os.Chmod(data, 0o777); err != nil { // past the umask: the pod may run as anyone
		return err
	}
	root, err := fs.NewLoopbackRoot(data)
	if err != nil {
		return err
	}
	syscall.Umask(0) // the kernel has applied the caller's
	server, err := fs.Mount(path, &sharedNode{root.(*fs.LoopbackNode)}, &fs.Options{MountOptions: fuse.MountOptions{
		AllowOther: true, DirectMountStrict: true, EnableLocks: true, FsName: "localcluster", Name: "network",
		Options: []string{"default_permissions"},
	}})
	if err != nil {
		return fmt.Errorf("mount by FUSE: %w", err)
	}
	m.servers[path] = server
	return nil
}

// sharedNode gives what is made in a directory whose set-group-ID bit is set the directory's group, as file systems of a
// kernel do: pods of several users share a volume by its group.
type sharedNode struct{ *fs.LoopbackNode }

func (n *sharedNode) WrapChild(_ context.Context, child fs.InodeEmbedder) fs.InodeEmbedder {
	return &sharedNode{child.(*fs.LoopbackNode)}
}

func (n *sharedNode) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	made, errno := n.LoopbackNode.Mkdir(ctx, name, mode, out)
	if errno == 0 {
		n.inherit(name, &out.Attr)
	}
	return made, errno
}

func (n *sharedNode) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	made, handle, fuseFlags, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	if errno == 0 {
		n.inherit(name, &out.Attr)
	}
	return made, handle, fuseFlags, errno
}

func (n *sharedNode) inherit(name string, told *fuse.Attr) {
	directory := filepath.Join(n.RootData.Path, n.Path(n.Root()))
	var above, st syscall.Stat_t
	if syscall.Lstat(directory, &above) != nil || above.Mode&syscall.S_ISGID == 0 {
		return
	}
	path := filepath.Join(directory, name)
	if syscall.Lchown(path, -1, int(above.Gid)) == nil && syscall.Lstat(path, &st) == nil {
		told.FromStat(&st)
	}
}

// remove ends what is mounted at a path, and removes that with its data.
func (m *mounts) remove(path string) error {
	delete(m.servers, path)
	if err := unmount(path); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(path), os.RemoveAll(path+imageSuffix), os.RemoveAll(path+dataSuffix))
}

func unmount(path string) error {
	mounted, err := isMounted(path)
	if err != nil || !mounted {
		return err
	}
	return syscall.Unmount(path, syscall.MNT_DETACH)
}

func isMounted(path string) (bool, error) {
	var here, above syscall.Stat_t
	if err := syscall.Stat(path, &here); errors.Is(err, syscall.ENOTCONN) {
		return true, nil // by FUSE, whose server is gone
	} else if errors.Is(err, syscall.ENOENT) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	if err := syscall.Stat(filepath.Dir(path), &above); err != nil {
		return false, err
	}
	return here.Dev != above.Dev, nil
}

func run(words ...string) error {
	_, err := output(words...)
	return err
}

func output(words ...string) (string, error) {
	var said bytes.Buffer
	command := exec.Command(words[0], words[1:]...)
	command.Stderr = &said
	out, err := command.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(words, " "), err, strings.TrimSpace(said.String()))
	}
	return strings.TrimSpace(string(out)), nil
}
