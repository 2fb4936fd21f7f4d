package supervisor

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// takeUsers is for an ordinary user who was given subordinate ids (/etc/subuid, /etc/subgid): it replaces this process by
// itself in a user namespace that has them, where it is root, so that pods can run as the users they ask for. Without such
// ids, or without the programs that map them, it returns: the cluster then has one user.
func takeUsers() error {
	if os.Geteuid() == 0 {
		return nil
	}
	unshare, err := exec.LookPath("unshare")
	if err != nil {
		return nil
	}
	words := []string{"unshare", "--user", "--map-root-user", "--map-auto", "--"}
	if exec.Command(unshare, append(words[1:], "true")...).Run() != nil {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	words = append(append(words, self), os.Args[1:]...)
	return fmt.Errorf("exec %s: %w", unshare, syscall.Exec(unshare, words, os.Environ()))
}
