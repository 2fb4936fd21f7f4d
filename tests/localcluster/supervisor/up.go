// Package supervisor runs a cluster: it starts every component in namespaces that end with it.
//
// Two processes own a cluster. The supervisor (Up) holds directory, lock and port, and waits. Its child (Inside) is pid 1
// of new mount, process, network, IPC and host name namespaces and the parent of all components. However the supervisor
// ends, the kernel kills its child, and with pid 1 of a process namespace all others in it; mounts, interfaces and ports go
// with their namespaces. What the kernel does not take back, control groups and the kubeconfig that says "ready", a third
// small process removes (package sweep).
package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"a.localcluster/layout"
	"a.localcluster/sweep"
)

func init() {
	// The kernel's parent-death signal follows the thread, not the process: main must stay on the first thread, which lasts.
	runtime.LockOSThread()
}

// Up runs a cluster until it is told to end, or its pid 1 ends.
func Up(o Options) error {
	if err := preflight(); err != nil {
		return err
	}
	if err := takeUsers(); err != nil {
		return err
	}
	if err := keepDescriptors(); err != nil {
		return err
	}
	if err := os.MkdirAll(string(o.Dir), 0o700); err != nil {
		return err
	}
	lockFile, err := takeLock(o.Dir)
	if err != nil {
		return err
	}
	defer lockFile.Close()
	port, err := listen(&o)
	if err != nil {
		return err
	}
	defer port.Close()
	for _, stale := range []string{o.Dir.State(), o.Dir.Kubeconfig()} {
		if err := os.Remove(stale); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	broom, err := sweep.Start(o.Dir)
	if err != nil {
		return err
	}
	inner, err := startInside(o, port, lockFile)
	if err != nil {
		return errors.Join(err, lockFile.Close(), broom.Finish())
	}
	err = State{Options: o, PID: os.Getpid(), Inner: inner.Pid, Started: time.Now()}.write()
	if err == nil {
		err = waitFor(inner, o.StopOnEOF)
	} else {
		err = errors.Join(err, inner.Kill())
	}
	return errors.Join(err, port.Close(), lockFile.Close(), broom.Finish())
}

// takeLock waits a moment, as a supervisor that was just killed is still being swept up after.
func takeLock(dir layout.Dir) (*os.File, error) {
	f, err := os.OpenFile(dir.Lock(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(2 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if err = lock(f); err == nil {
			return f, nil
		}
		if !isLocked(err) || time.Now().After(end) {
			break
		}
	}
	f.Close()
	if isLocked(err) {
		return nil, fmt.Errorf("%s is in use by another supervisor: end it with `localcluster down --dir %s`", dir, dir)
	}
	return nil, fmt.Errorf("lock %s: %w", dir.Lock(), err)
}

// listen opens the port outside. Any port means: that of last time if it is free, so that a kubeconfig stays true.
func listen(o *Options) (*os.File, error) {
	ports := []int{o.Port}
	if o.Port == 0 {
		if last, err := readState(o.Dir); err == nil {
			ports = []int{last.Options.Port, 0}
		}
	}
	var l net.Listener
	var err error
	for _, p := range ports {
		if l, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", p)); err == nil {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("port for the API server: %w", err)
	}
	defer l.Close() // the file is a duplicate
	o.Port = l.Addr().(*net.TCPAddr).Port
	return l.(*net.TCPListener).File()
}

const namespaces = syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS

func startInside(o Options, port, lockFile *os.File) (*os.Process, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true, Cloneflags: namespaces}
	if os.Geteuid() != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	p, err := os.StartProcess(layout.Self, []string{"localcluster", "inside", string(text)}, &os.ProcAttr{
		Files: []*os.File{nil, os.Stdout, os.Stderr, port, lockFile}, // portFD, and the lock
		Env:   os.Environ(), Sys: attr})
	if err != nil {
		return nil, refusedNamespaces(err)
	}
	return p, nil
}

// waitFor passes signals on to the child and returns when it has ended. It is no error if that was asked for.
func waitFor(inner *os.Process, stopOnEOF bool) error {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	if stopOnEOF {
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin) // however it ends, whoever held the other end is gone
			signals <- syscall.SIGTERM
		}()
	}
	asked := make(chan struct{})
	go func() {
		<-signals
		close(asked)
		for { // an impatient second signal ends it at once
			_ = inner.Signal(syscall.SIGTERM) // already ended: as wanted
			<-signals
			_ = inner.Kill()
		}
	}()
	state, err := inner.Wait()
	if err != nil {
		return err
	}
	select {
	case <-asked:
		return nil
	default:
	}
	if state.ExitCode() == 1 { // it has said why
		return errSaid
	}
	return fmt.Errorf("the process that holds the cluster ended: %s", state)
}

// errSaid is an error whose message is already on the terminal.
var errSaid = errors.New("")

// WasSaid tells whether an error needs no more words.
func WasSaid(err error) bool { return errors.Is(err, errSaid) }
