package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"a.localcluster/box"
	"a.localcluster/layout"
	"a.localcluster/network"
)

var inUserNamespace = box.InUserNamespace

// tunables are kernel settings that the kubelet sets at its start, for the whole machine. It finds these files over the real
// ones, with the values it wants, and so writes nothing.
var tunables = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

func mount(source, target, kind string, flags uintptr, data string) error {
	if err := syscall.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", source, target, err)
	}
	return nil
}

// closeMachine makes the cluster's mount namespace: a /proc of its own, and no way to the machine's settings.
func closeMachine(dir layout.Dir) error {
	if err := mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return refusedNamespaces(err)
	}
	if err := mount("proc", "/proc", "proc", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, ""); err != nil {
		return refusedNamespaces(err)
	}
	if err := mount("/proc/sys", "/proc/sys", "", syscall.MS_BIND, ""); err != nil {
		return err
	}
	if err := mount("", "/proc/sys", "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		return err
	}
	if err := shareVolumes(dir.Path("volumes")); err != nil {
		return err
	}
	if err := os.MkdirAll(dir.Path("tunables"), 0o755); err != nil {
		return err
	}
	for name, value := range tunables {
		f := dir.Path("tunables", strings.ReplaceAll(name, "/", "."))
		if err := os.WriteFile(f, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := mount(f, "/proc/sys/"+name, "", syscall.MS_BIND, ""); err != nil {
			return err
		}
	}
	return nil
}

// shareVolumes lets nodes see what the provisioner mounts there later.
func shareVolumes(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	if err := mount(path, path, "", syscall.MS_BIND, ""); err != nil {
		return err
	}
	return mount("", path, "", syscall.MS_SHARED, "")
}

// nodeNamespaces are what a node's kubelet and runtime share: mounts, as the runtime shows containers what the kubelet
// mounted, and the host name, which pods in the node's network see.
type nodeNamespaces struct{ mounts, uts *os.File }

// The kubelet's and the containers' files lie where they lie on any node, and some of them whatever the kubelet's settings.
// In its node's namespace these are directories of the node.
const (
	kubeletRoot = "/var/lib/kubelet"
	logRoot     = "/var/log"
	shimRoot    = "/run/containerd" // sockets of containerd's shims
)

func makeNodeNamespaces(n layout.Node, containerd bool) (*nodeNamespaces, error) {
	ns := &nodeNamespaces{}
	own := map[string]string{kubeletRoot: n.Kubelet(), logRoot: n.Logs()}
	if containerd {
		own[shimRoot] = n.Shims()
	}
	err := network.OnThread(func() (err error) {
		if err := unix.Unshare(syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS); err != nil {
			return err
		}
		if err := syscall.Sethostname([]byte(n.Name())); err != nil {
			return err
		}
		if err := mount("", "/", "", syscall.MS_REC|syscall.MS_SLAVE, ""); err != nil { // to what is shared: volumes
			return err
		}
		for at, own := range own {
			if err := os.MkdirAll(own, 0o755); err != nil {
				return err
			}
			if err := provideDirectory(at); err != nil {
				return err
			}
			if err := mount(own, at, "", syscall.MS_BIND, ""); err != nil {
				return err
			}
		}
		if err := mount("", "/", "", syscall.MS_REC|syscall.MS_SHARED, ""); err != nil { // so that volumes may propagate into containers
			return err
		}
		if ns.mounts, err = os.Open("/proc/thread-self/ns/mnt"); err != nil {
			return err
		}
		ns.uts, err = os.Open("/proc/thread-self/ns/uts")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("namespaces of %s: %w", n.Name(), err)
	}
	return ns, nil
}

// provideDirectory makes a directory in the calling thread's mount namespace alone: where it is missing, its parent is
// covered by a tmpfs that shows all that the parent holds, and the directory.
func provideDirectory(path string) error {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return nil
	}
	parent := filepath.Dir(path)
	if err := provideDirectory(parent); err != nil {
		return err
	}
	entries, err := os.ReadDir(parent)
	if err != nil {
		return err
	}
	below, err := os.Open(parent) // a way to what is about to be covered
	if err != nil {
		return err
	}
	defer below.Close()
	if err := mount("tmpfs", parent, "tmpfs", 0, "mode=0755"); err != nil {
		return err
	}
	for _, e := range entries {
		from, to := fmt.Sprintf("/proc/thread-self/fd/%d/%s", below.Fd(), e.Name()), filepath.Join(parent, e.Name())
		if e.Type()&os.ModeSymlink != 0 {
			link, err := os.Readlink(from)
			if err != nil {
				return err
			}
			if err := os.Symlink(link, to); err != nil {
				return err
			}
			continue
		}
		if e.IsDir() {
			err = os.Mkdir(to, 0o755)
		} else {
			err = os.WriteFile(to, nil, 0o644)
		}
		if err != nil {
			return err
		}
		if err := mount(from, to, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
			return err
		}
	}
	return os.Mkdir(path, 0o755)
}

// enter puts the calling thread, which must be one that is thrown away, into the node's namespaces.
func (ns *nodeNamespaces) enter() error {
	if err := unix.Unshare(syscall.CLONE_FS); err != nil { // threads share root and directory, which a mount namespace does not allow
		return err
	}
	if err := unix.Setns(int(ns.uts.Fd()), syscall.CLONE_NEWUTS); err != nil {
		return err
	}
	return unix.Setns(int(ns.mounts.Fd()), syscall.CLONE_NEWNS)
}
