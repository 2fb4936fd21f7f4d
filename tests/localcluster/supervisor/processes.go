package supervisor

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"a.localcluster/layout"
	"a.localcluster/network"
)

// component is one process of the cluster: this binary again, under another name, or another program.
type component struct {
	name    string // of its log and pid files
	program string // "": this binary
	args    []string
	node    *nodeNamespaces // nil: in the supervisor's own

	pid     int
	started time.Time
	starts  int
}

// processes are pid 1's children. One goroutine (run) starts and reaps them.
type processes struct {
	dir     layout.Dir
	env     []string
	running map[int]*component
	asked   chan *component
	failed  chan error // a component that can't be kept up
	ready   bool       // set once the cluster was ready: from then on components are started again however often they end
	readied chan struct{}
}

const (
	startsBeforeReady = 3                // a component that ends this often before the cluster is ready will not come up
	shortLife         = 10 * time.Second // one that ended sooner is started again after a pause
	logLimit          = 16 << 20         // bytes of a component's log, of which one older part is kept
)

func newProcesses(dir layout.Dir, env []string) *processes {
	return &processes{dir: dir, env: env, running: map[int]*component{}, asked: make(chan *component, 16),
		failed: make(chan error, 1), readied: make(chan struct{}, 1)}
}

func (p *processes) start(c *component) error {
	log, err := os.OpenFile(p.dir.Log(c.name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	var child *os.Process
	start := func() (err error) {
		if c.node != nil {
			if err := c.node.enter(); err != nil {
				return err
			}
		}
		// os.StartProcess and not exec.Command: run collects every child of pid 1, these too
		program, name := layout.Self, "localcluster"
		if c.program != "" {
			program, name = c.program, c.program
		}
		child, err = os.StartProcess(program, append([]string{name}, c.args...),
			&os.ProcAttr{Dir: string(p.dir), Env: p.env, Files: []*os.File{nil, log, log}})
		return err
	}
	if err := network.OnThread(start); err != nil {
		return fmt.Errorf("start %s: %w", c.name, err)
	}
	c.pid, c.started = child.Pid, time.Now()
	c.starts++
	p.running[c.pid] = c
	if err := os.WriteFile(p.dir.PID(c.name), fmt.Appendf(nil, "%d\n", c.pid), 0o600); err != nil {
		return err
	}
	return child.Release()
}

// run is the life of pid 1: it collects orphans of containers, starts again a component that ended, and bounds the logs.
func (p *processes) run(ctx context.Context) error {
	child := make(chan os.Signal, 1)
	signal.Notify(child, syscall.SIGCHLD)
	defer signal.Stop(child)
	everySecond := time.NewTicker(time.Second)
	defer everySecond.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-p.failed:
			return err
		case <-p.readied:
			p.ready = true
		case c := <-p.asked:
			if err := p.start(c); err != nil {
				return err
			}
		case <-child:
		case <-everySecond.C: // a signal may be lost
			if err := p.boundLogs(); err != nil {
				return err
			}
		}
		for _, ended := range p.reap() {
			if err := p.again(ended.component, ended.status); err != nil {
				return err
			}
		}
	}
}

type ending struct {
	component *component
	status    syscall.WaitStatus
}

// reap collects all children that have ended, and returns those that are components.
func (p *processes) reap() (out []ending) {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if pid <= 0 || err != nil {
			return out
		}
		if c := p.running[pid]; c != nil {
			delete(p.running, pid)
			out = append(out, ending{c, ws})
		}
	}
}

func (p *processes) again(c *component, ws syscall.WaitStatus) error {
	how := fmt.Sprintf("with exit code %d", ws.ExitStatus())
	if ws.Signaled() {
		how = fmt.Sprintf("by signal %d (%s)", ws.Signal(), ws.Signal())
	}
	if !p.ready && c.starts >= startsBeforeReady {
		return fmt.Errorf("%s ended %s, %d times before the cluster was ready; its log %s ends with:\n%s",
			c.name, how, c.starts, p.dir.Log(c.name), tail(p.dir.Log(c.name), 1500))
	}
	fmt.Fprintf(os.Stderr, "%s ended %s, starting it again\n", c.name, how)
	pause := time.Second
	if time.Since(c.started) > shortLife {
		pause = 0
	}
	time.AfterFunc(pause, func() { p.asked <- c })
	return nil
}

// boundLogs cuts a log that has grown too long, after copying it aside. The writer appends, so it goes on at the new end.
func (p *processes) boundLogs() error {
	for _, c := range p.running {
		path := p.dir.Log(c.name)
		st, err := os.Stat(path)
		if err != nil || st.Size() < logLimit {
			continue // removed by hand: no reason to end the cluster
		}
		if err := copyAside(path); err != nil {
			return err
		}
	}
	return nil
}

func copyAside(path string) error {
	from, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(path+".1", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer to.Close()
	if _, err := io.Copy(to, from); err != nil {
		return err
	}
	return from.Truncate(0)
}

// stop ends the named kinds of components, and returns when they have ended or after limit, when they are killed.
func (p *processes) stop(limit time.Duration, signal syscall.Signal, kinds ...string) {
	of := func() (out []int) {
		for pid, c := range p.running {
			for _, kind := range kinds {
				if c.args[0] == kind || filepath.Base(c.program) == kind {
					out = append(out, pid)
				}
			}
		}
		return out
	}
	for _, pid := range of() {
		_ = syscall.Kill(pid, signal) // ended meanwhile: as wanted
	}
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		p.reap()
		if len(of()) == 0 {
			return
		}
	}
	for _, pid := range of() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// tail is the last part of a file, from the beginning of a line.
func tail(path string, size int64) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > size {
		if _, err := f.Seek(-size, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	text, err := io.ReadAll(io.LimitReader(f, size))
	if err != nil {
		return err.Error()
	}
	if i := bytes.IndexByte(text, '\n'); i >= 0 && int64(len(text)) == size {
		text = text[i+1:]
	}
	return string(bytes.TrimSpace(text))
}
