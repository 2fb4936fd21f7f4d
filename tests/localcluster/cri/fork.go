package cri

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"a.localcluster/network"
)

// fork runs f inside the pod's namespaces, on the thread that starts containers, which then goes back to the node's.
func (s *server) fork(ns *network.Namespaces, f func() error) error {
	done := make(chan error, 1)
	s.forks <- func() { done <- inNamespaces(ns, f) }
	return <-done
}

func inNamespaces(ns *network.Namespaces, f func() error) error {
	for _, n := range []struct {
		file *os.File
		name string
		kind int
	}{{ns.Net, "net", syscall.CLONE_NEWNET}, {ns.IPC, "ipc", syscall.CLONE_NEWIPC}, {ns.UTS, "uts", syscall.CLONE_NEWUTS}, {ns.PID, "pid", syscall.CLONE_NEWPID}} {
		if n.file == nil {
			continue
		}
		own, err := syscall.Open("/proc/thread-self/ns/"+n.name, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() {
			if err := unix.Setns(own, n.kind); err != nil {
				// every later container would get this pod's namespace
				fmt.Fprintf(os.Stderr, "can't go back to the node's %s namespace, so this runtime ends: %v\n", n.name, err)
				os.Exit(1)
			}
			_ = syscall.Close(own) // only read
		}()
		if err := unix.Setns(int(n.file.Fd()), n.kind); err != nil {
			return fmt.Errorf("enter the pod's %s namespace: %w", n.name, err)
		}
	}
	return f()
}
