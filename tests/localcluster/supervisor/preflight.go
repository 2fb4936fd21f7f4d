package supervisor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// preflight names what is missing on this machine, before anything is made.
func preflight() error {
	for _, program := range []string{"mount", "umount"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("the program %q is missing, which the kubelet mounts volumes with: install util-linux", program)
		}
	}
	if _, err := os.Stat("/proc/self/ns/net"); err != nil {
		return fmt.Errorf("/proc shows no namespaces: mount it, and use a kernel with CONFIG_NET_NS")
	}
	return nil
}

// refusedNamespaces explains why the kernel would not make new namespaces, or would not let us mount in them.
func refusedNamespaces(err error) error {
	if !errors.Is(err, syscall.EPERM) && !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.EACCES) {
		return fmt.Errorf("start in new namespaces: %w", err)
	}
	if os.Geteuid() != 0 || inUserNamespace {
		return fmt.Errorf("this machine lets no ordinary user have namespaces (%w): run as root, or allow them "+
			"(sysctl user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, where they exist)", err)
	}
	return fmt.Errorf("root may not make namespaces or mount here (%w): in a container, it must be a privileged one", err)
}
