package cri

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	utilexec "k8s.io/utils/exec"

	"a.localcluster/box"
	"a.localcluster/network"
)

// startInside starts a command in a running container: a thread enters the container's namespaces, gives up what the
// container may not have, starts the command and is thrown away. With a terminal it returns the terminal's master side.
func (s *server) startInside(id string, args []string, cmd *exec.Cmd, tty bool) (master *os.File, err error) {
	c, pid, err := s.running(id)
	if err != nil {
		return nil, err
	}
	err = network.OnThread(func() error {
		if err := enterContainer(pid); err != nil {
			return err
		}
		dir := c.Config.WorkingDir
		if dir == "" {
			dir = c.image.WorkingDir
		}
		if dir == "" {
			dir = "/"
		}
		if err := syscall.Chdir(dir); err != nil {
			return err
		}
		if err := box.LimitCapabilities(uint64(c.caps), c.security().GetNoNewPrivs()); err != nil {
			return err
		}
		path, err := box.LookPath(args[0], c.env)
		if err != nil {
			return utilexec.CodeExitError{Err: err, Code: 127}
		}
		cmd.Path, cmd.Args, cmd.Env, cmd.Dir = path, args, c.env, dir
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: credential(c.Account)}
		if !tty {
			return cmd.Start()
		}
		var slave *os.File
		if master, slave, err = openTerminal(c.Account.UID); err != nil {
			return err
		}
		defer slave.Close()
		cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
		cmd.SysProcAttr.Setctty = true
		cmd.Env = append(append([]string{}, c.env...), "TERM=xterm")
		return cmd.Start()
	})
	if err != nil {
		return nil, err
	}
	return master, s.groups.Join(id, cmd.Process.Pid)
}

func credential(a account) *syscall.Credential {
	c := &syscall.Credential{Uid: uint32(a.UID), Gid: uint32(a.GID), NoSetGroups: box.OneUser}
	for _, g := range a.Groups {
		c.Groups = append(c.Groups, uint32(g))
	}
	return c
}

// enterContainer moves the calling thread into the namespaces of a container's first process.
func enterContainer(pid int) error {
	if err := unix.Unshare(syscall.CLONE_FS); err != nil { // threads share root and directory, which a mount namespace does not allow
		return err
	}
	kinds := []struct {
		name string
		flag int
		file *os.File
	}{{name: "net", flag: syscall.CLONE_NEWNET}, {name: "ipc", flag: syscall.CLONE_NEWIPC}, {name: "uts", flag: syscall.CLONE_NEWUTS},
		{name: "pid", flag: syscall.CLONE_NEWPID}, {name: "mnt", flag: syscall.CLONE_NEWNS}}
	for i, k := range kinds { // all opened before the last one takes /proc away
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", pid, k.name))
		if err != nil {
			return err
		}
		defer f.Close()
		kinds[i].file = f
	}
	for _, k := range kinds {
		if err := unix.Setns(int(k.file.Fd()), k.flag); err != nil {
			return fmt.Errorf("enter the container's %s namespace: %w", k.name, err)
		}
	}
	return nil
}

// openTerminal opens a pair of the calling thread's /dev/pts, the container's own.
func openTerminal(uid int) (master, slave *os.File, err error) {
	if master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0); err != nil {
		return nil, nil, err
	}
	fd := int(master.Fd())
	if err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err == nil {
		var n int
		if n, err = unix.IoctlGetInt(fd, unix.TIOCGPTN); err == nil {
			slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
		}
	}
	if err == nil {
		err = slave.Chown(uid, -1)
	}
	if err != nil {
		return nil, nil, errors.Join(err, master.Close())
	}
	return master, slave, nil
}

// ExecSync runs a command to its end, as for a probe.
func (s *server) ExecSync(ctx context.Context, q *v1.ExecSyncRequest) (*v1.ExecSyncResponse, error) {
	var stdout, stderr bytes.Buffer
	cmd := &exec.Cmd{Stdout: &stdout, Stderr: &stderr, WaitDelay: time.Second}
	if _, err := s.startInside(q.ContainerId, q.Cmd, cmd, false); err != nil {
		var code utilexec.CodeExitError
		if errors.As(err, &code) {
			return &v1.ExecSyncResponse{Stderr: []byte(err.Error()), ExitCode: int32(code.Code)}, nil
		}
		return nil, err
	}
	if q.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(q.Timeout)*time.Second)
		defer cancel()
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // the exit code is asked for below
		close(ended)
	}()
	select {
	case <-ended:
		return &v1.ExecSyncResponse{Stdout: stdout.Bytes(), Stderr: stderr.Bytes(), ExitCode: exitCode(cmd.ProcessState)}, nil
	case <-ctx.Done():
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its session: a probe's shell and children
		<-ended
		return nil, status.Errorf(codes.DeadlineExceeded, "command timed out after %d s", q.Timeout)
	}
}
