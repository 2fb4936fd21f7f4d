package supervisor

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"a.localcluster/layout"
)

// UpDetached starts Up as a process of its own, with the arguments given, and returns when the cluster is ready. A cluster
// that runs already is left as it is, if it is the one asked for.
func UpDetached(o Options, args []string) error {
	if running, err := Running(o.Dir); err != nil {
		return err
	} else if running {
		return joinRunning(o)
	}
	if err := preflight(); err != nil {
		return err
	}
	if err := os.MkdirAll(o.Dir.Path("logs"), 0o700); err != nil {
		return err
	}
	log, err := os.OpenFile(o.Dir.Log("supervisor"), os.O_CREATE|os.O_TRUNC|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	if err := keepDescriptors(); err != nil {
		return err
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP) // before there is a supervisor, who would be left alone
	p, err := os.StartProcess(layout.Self, append([]string{"localcluster"}, args...), &os.ProcAttr{
		Files: []*os.File{nil, log, log}, Env: os.Environ(), Sys: &syscall.SysProcAttr{Setsid: true}})
	if err != nil {
		return err
	}
	var heard strings.Builder
	ended := make(chan *os.ProcessState, 1)
	go func() {
		state, _ := p.Wait() // a child's end can't be missed
		ended <- state
	}()
	said := io.TeeReader(io.NewSectionReader(log, 0, 1<<62), &heard)
	for {
		select {
		case s := <-signals:
			err := errors.Join(p.Signal(syscall.SIGTERM), fmt.Errorf("%v before the cluster was ready: it is ended", s))
			<-ended
			return err
		case <-ended:
			if err := pass(said); err != nil {
				return err
			}
			return errSaid
		case <-time.After(50 * time.Millisecond):
		}
		if err := pass(said); err != nil {
			return err
		}
		if strings.Contains("\n"+heard.String(), "\n"+readyWords) { // its last words; a kubeconfig may be of before
			return nil
		}
	}
}

// keepDescriptors keeps what the caller left open from the processes that this one starts: a lock or a pipe of its would be
// held for as long as the cluster runs, by containers too.
func keepDescriptors() error {
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("list this process's descriptors: %w", err)
	}
	for _, entry := range open {
		if fd, err := strconv.Atoi(entry.Name()); err == nil && fd > 2 {
			syscall.CloseOnExec(fd)
		}
	}
	return nil
}

// pass prints what the supervisor has said since last time.
func pass(said io.Reader) error {
	_, err := io.Copy(os.Stdout, said)
	return err
}

// joinRunning waits for a cluster that another has started.
func joinRunning(o Options) error {
	for end := time.Now().Add(readyLimit); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		state, err := readState(o.Dir)
		if os.IsNotExist(err) {
			continue // it has only just begun
		}
		if err != nil {
			return err
		}
		if d := o.differences(state.Options); len(d) > 0 {
			return fmt.Errorf("already running, but %s: `localcluster down --dir %s` first", strings.Join(d, ", "), o.Dir)
		}
		if _, err := os.Stat(o.Dir.Kubeconfig()); err == nil {
			fmt.Printf("already running: export KUBECONFIG=%s\n", o.Dir.Kubeconfig())
			return nil
		}
		if running, err := Running(o.Dir); err != nil || !running {
			return errors.Join(err, fmt.Errorf("the supervisor of %s ended before the cluster was ready", o.Dir))
		}
	}
	return fmt.Errorf("the supervisor of %s runs, but the cluster is not ready after %v; see %s", o.Dir, readyLimit, o.Dir.Path("logs"))
}
