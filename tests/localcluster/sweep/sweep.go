// Package sweep removes what a cluster leaves outside of its namespaces, after its supervisor has ended in any way: the
// control groups, and the kubeconfig whose presence says that the cluster is ready.
//
// The broom is a process of its own, as one that is killed can't clean up after itself. It holds one end of a pipe, sees by
// its end that the supervisor is gone, sweeps and exits. Like package box it runs before main, to stay small.
package sweep

import (
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"a.localcluster/cgroup"
	"a.localcluster/layout"
)

const (
	arg0   = "localcluster-sweep"
	pipeFD = 3
	// patience: by then pid 1 of the namespaces has been reaped by the kernel, or another supervisor has taken the directory
	patience = 10 * time.Second
)

func init() {
	if os.Args[0] == arg0 {
		if err := run(layout.Dir(os.Args[1])); err != nil {
			fmt.Fprintln(os.Stderr, "localcluster: sweep up:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// Broom is the process that waits for the caller's end.
type Broom struct {
	process *os.Process
	alive   *os.File // closed by the kernel, whatever ends the caller
}

// Start sweeps up after a supervisor of before that was killed together with its broom, and readies a broom for the caller,
// who holds the directory's lock.
func Start(dir layout.Dir) (*Broom, error) {
	if err := cgroup.RemoveCluster(dir.Tag()); err != nil {
		return nil, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer read.Close()
	p, err := os.StartProcess(layout.Self, []string{arg0, string(dir)}, &os.ProcAttr{
		Files: []*os.File{nil, nil, os.Stderr, read}, Env: []string{"GOMAXPROCS=1"},
		Sys: &syscall.SysProcAttr{Setsid: true}}) // not in the terminal's group: Ctrl-C is not for it
	if err != nil {
		return nil, fmt.Errorf("start the process that sweeps up: %w", err)
	}
	return &Broom{process: p, alive: write}, nil
}

// Finish sweeps now. The caller has let go of the lock.
func (b *Broom) Finish() error {
	if err := b.alive.Close(); err != nil {
		return err
	}
	state, err := b.process.Wait()
	if err == nil && !state.Success() {
		err = fmt.Errorf("sweep up: %s", state)
	}
	return err
}

func run(dir layout.Dir) error {
	_, _ = io.Copy(io.Discard, os.NewFile(pipeFD, "alive")) // any end is the supervisor's
	f, err := os.OpenFile(dir.Lock(), os.O_RDWR, 0)
	if os.IsNotExist(err) { // the directory was deleted below a supervisor that was then killed
		return cgroup.RemoveCluster(dir.Tag())
	}
	if err != nil {
		return err
	}
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
		if err == nil {
			break
		}
		if time.Now().After(end) {
			return nil // whoever has the directory by now sweeps it
		}
	}
	if err := os.Remove(dir.Kubeconfig()); err != nil && !os.IsNotExist(err) {
		return err
	}
	return cgroup.RemoveCluster(dir.Tag())
}
