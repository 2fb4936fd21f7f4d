package box

import (
	"os"
	"path/filepath"
	"syscall"
)

// mountDevices makes a /dev of the container's own: the harmless devices of every container, its terminals, the pod's shared
// memory, and what image or device plugins ask for.
func mountDevices(root string, s *Spec) error {
	dev := root + "/dev"
	if err := place(dev, true); err != nil {
		return err
	}
	if err := mount("devices", "tmpfs", dev, "tmpfs", syscall.MS_NOSUID, "mode=0755"); err != nil {
		return err
	}
	show := append([]string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"}, s.Devices...)
	if s.Privileged {
		entries, err := os.ReadDir("/dev")
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.Type()&os.ModeDevice != 0 && e.Name() != "ptmx" { // its own one follows
				show = append(show, "/dev/"+e.Name())
			}
		}
	}
	for _, d := range show {
		st, err := os.Stat(d)
		if err != nil {
			return err
		}
		if err := place(root+d, st.IsDir()); err != nil {
			return err
		}
		if err := mount("device", d, root+d, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
			return err
		}
	}
	for _, d := range []string{"pts", "shm", "mqueue"} {
		if err := os.Mkdir(filepath.Join(dev, d), 0o755); err != nil {
			return err
		}
	}
	if err := mount("terminals", "devpts", dev+"/pts", "devpts", syscall.MS_NOSUID|syscall.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"); err != nil {
		return err
	}
	if err := mount("shared memory", s.Shm, dev+"/shm", "", syscall.MS_BIND, ""); err != nil {
		return err
	}
	for _, l := range [][2]string{{"ptmx", "pts/ptmx"}, {"fd", "/proc/self/fd"}, {"stdin", "/proc/self/fd/0"}, {"stdout", "/proc/self/fd/1"}, {"stderr", "/proc/self/fd/2"}} {
		if err := os.Symlink(l[1], filepath.Join(dev, l[0])); err != nil {
			return err
		}
	}
	return nil
}

// mountKernel mounts /proc and /sys; what there reaches the whole machine is read-only or masked unless privileged.
func mountKernel(root string, s *Spec) error {
	for _, d := range []string{"/proc", "/sys"} {
		if err := place(root+d, true); err != nil {
			return err
		}
	}
	const safe = syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC
	if err := mount("proc", "proc", root+"/proc", "proc", safe, ""); err != nil {
		return err
	}
	var readonly uintptr = syscall.MS_RDONLY
	if s.Privileged {
		readonly = 0
	}
	if err := mount("sysfs", "sysfs", root+"/sys", "sysfs", safe|readonly, ""); err != nil { // a new one: it shows the pod's network
		return err
	}
	if _, err := os.Stat("/sys/fs/cgroup"); err == nil {
		if err := mount("cgroups", "/sys/fs/cgroup", root+"/sys/fs/cgroup", "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
			return err
		}
		if err := makeReadonly(root + "/sys/fs/cgroup"); err != nil && !s.Privileged {
			return err
		}
	}
	if s.Privileged {
		return nil
	}
	for _, f := range []string{"/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"} {
		if _, err := os.Stat(root + f); err != nil {
			continue // this kernel has none
		}
		if err := mount("itself", root+f, root+f, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
			return err
		}
		if err := makeReadonly(root + f); err != nil {
			return err
		}
	}
	for _, f := range []string{"/proc/kcore", "/proc/keys", "/proc/timer_list"} {
		if _, err := os.Stat(root + f); err != nil {
			continue
		}
		if err := mount("mask", "/dev/null", root+f, "", syscall.MS_BIND, ""); err != nil {
			return err
		}
	}
	return nil
}
