package cri

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"a.localcluster/box"
	"a.localcluster/devices"
	"a.localcluster/layout"
	"a.localcluster/network"
)

// drainLimit is how long the output of an ended container is still read, if a process elsewhere holds the other end.
const drainLimit = 10 * time.Second

// environment of a container: what stands for an image's on the machine's own root, the image's, then the pod's.
func (s *server) environment(p *sandbox, c *container) []string {
	var names []string
	values := map[string]string{}
	set := func(name, value string) {
		if _, ok := values[name]; !ok {
			names = append(names, name)
		}
		values[name] = value
	}
	path := os.Getenv("PATH")
	if c.image.Root != machineRoot || path == "" {
		path = box.DefaultPath
	}
	set("PATH", path)
	set("HOME", c.Account.Home)
	set("HOSTNAME", p.Config.Hostname)
	// the kubelet sets these once it knows Service "kubernetes", which may be after the first pod
	set("KUBERNETES_SERVICE_HOST", s.families[0].APIServer)
	set("KUBERNETES_SERVICE_PORT", strconv.Itoa(network.APIPort))
	for name, value := range c.image.Env {
		set(name, value)
	}
	for _, e := range c.Config.Envs {
		set(e.Key, string(e.Value))
	}
	out := make([]string, len(names))
	for i, n := range names {
		out[i] = n + "=" + values[n]
	}
	return out
}

// command of a container: as with any image, the pod's command replaces the entry point and its arguments.
func command(i *image, cfg *v1.ContainerConfig) []string {
	head, args := cfg.Command, cfg.Args
	if len(head) == 0 {
		head = i.Entrypoint
		if len(args) == 0 {
			args = i.Cmd
		}
	}
	return append(append([]string{}, head...), args...)
}

func (s *server) spec(p *sandbox, c *container) (*box.Spec, error) {
	sc, resources := c.security(), c.Config.GetLinux().GetResources()
	b := &box.Spec{
		Args: command(c.image, c.Config), Env: s.environment(p, c), Dir: c.Config.WorkingDir,
		Scratch: s.path("scratch"), Root: c.image.Root, Hide: c.image.Hide, ReadonlyRoot: sc.GetReadonlyRootfs(),
		Shm: s.path(sandboxKind, p.ID, "shm"), Privileged: sc.GetPrivileged(),
		UID: c.Account.UID, GID: c.Account.GID, Groups: c.Account.Groups,
		Capabilities: uint64(c.caps), NoNewPrivs: sc.GetNoNewPrivs(), OOMScoreAdj: int(resources.GetOomScoreAdj()),
	}
	if len(b.Args) == 0 {
		return nil, fmt.Errorf("the container has no command and image %q has no entrypoint", c.Image)
	}
	if b.Dir == "" {
		b.Dir = c.image.WorkingDir
	}
	if c.image.Root == machineRoot {
		b.Hide = append(append([]string{}, b.Hide...), string(s.node.Dir)) // keys and tokens
	}
	if p.namespaceOptions().GetIpc() == v1.NamespaceMode_NODE {
		b.Shm = "/dev/shm"
	}
	var err error
	if b.Binds, err = c.image.mounts(); err != nil {
		return nil, fmt.Errorf("image %q: %w", c.Image, err)
	}
	for _, pattern := range c.image.Devices {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, fmt.Errorf("image %q: devices %q: %w", c.Image, pattern, err)
		}
		b.Devices = append(b.Devices, found...)
	}
	for _, name := range []string{"resolv.conf", "hostname"} {
		b.Mounts = append(b.Mounts, box.Mount{Source: s.path(sandboxKind, p.ID, name), Target: "/etc/" + name})
	}
	for _, m := range c.Config.Mounts {
		if name := m.GetImage().GetImage(); name != "" {
			files, err := s.files(name, m.GetImageSubPath())
			if err != nil {
				return nil, err
			}
			b.Mounts = append(b.Mounts, box.Mount{Source: files, Target: m.ContainerPath, Readonly: true})
			continue
		}
		b.Mounts = append(b.Mounts, box.Mount{Source: m.HostPath, Target: m.ContainerPath, Readonly: m.Readonly,
			Propagate: m.Propagation != v1.MountPropagation_PROPAGATION_PRIVATE})
	}
	for _, d := range c.Config.Devices {
		b.Devices = append(b.Devices, d.HostPath)
	}
	for _, d := range c.Config.CDIDevices {
		edits, err := devices.Edits(s.node, d.Name)
		if err != nil {
			return nil, err
		}
		edits.Apply(b)
	}
	if b.Cgroups, err = s.groups.Create(c.ID, resources.GetMemoryLimitInBytes()); err != nil {
		return nil, fmt.Errorf("memory limit: %w", err)
	}
	return b, nil
}

// files of an image, or a directory of them, for a volume.
func (s *server) files(name, sub string) (string, error) {
	i, err := s.images.find(name)
	if err != nil {
		return "", err
	}
	if i.Root == machineRoot {
		return "", fmt.Errorf("image %q is this machine's own root, which is no volume: give it a root", name)
	}
	return filepath.Join(i.Root, filepath.Clean("/"+sub)), nil
}

// launch starts a container's command, and returns when it runs or has failed to.
func (s *server) launch(p *sandbox, c *container) error {
	spec, err := s.spec(p, c)
	if err != nil {
		return err
	}
	log := &logFile{path: c.Config.LogPath, now: time.Now}
	if err := log.open(); err != nil {
		return err
	}
	process, output, err := s.startFirst(p, c, spec)
	if err != nil {
		log.close()
		return err
	}
	s.mu.Lock()
	c.env, c.log = spec.Env, log
	c.pid, c.Started, c.State = process.Pid, now(), v1.ContainerState_CONTAINER_RUNNING
	err = s.save(containerKind, c.ID, c)
	s.mu.Unlock()
	go s.follow(c, process, output)
	return err
}

// startFirst starts the container's first process, hands it its specification, and returns when the command has replaced it.
func (s *server) startFirst(p *sandbox, c *container, spec *box.Spec) (process *os.Process, output [2]*os.File, err error) {
	namespaces, flags, err := s.namespacesOf(p, c)
	if err != nil {
		return nil, output, err
	}
	if namespaces.PID != nil && namespaces.PID != p.namespaces.PID {
		defer namespaces.PID.Close() // opened for this start
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, output, err
	}
	var pipes [4][2]*os.File // specification, error, output, error output; each its end to read and to write
	defer func() {
		for _, pipe := range pipes {
			for _, end := range pipe {
				if end != nil {
					end.Close()
				}
			}
		}
	}()
	for i := range pipes {
		if pipes[i][0], pipes[i][1], err = os.Pipe(); err != nil {
			return nil, output, err
		}
	}
	if err := s.fork(namespaces, func() (err error) {
		process, err = os.StartProcess(layout.Self, []string{box.InitArg0}, &os.ProcAttr{Dir: "/", Env: []string{"GOMAXPROCS=1"},
			Sys:   &syscall.SysProcAttr{Cloneflags: flags, Setsid: true}, // it sets its parent-death signal by itself
			Files: []*os.File{nil, pipes[2][1], pipes[3][1], pipes[0][0], pipes[1][1]}})
		return err
	}); err != nil {
		return nil, output, err
	}
	for _, ours := range []*os.File{pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][1]} {
		ours.Close() // the child has them
	}
	_, err = pipes[0][1].Write(text)
	pipes[0][1].Close()
	failure, readErr := io.ReadAll(pipes[1][0]) // ends when the command replaces the first process
	if err = errors.Join(err, readErr); err == nil && len(failure) > 0 {
		err = errors.New(string(failure))
	}
	if err != nil {
		_ = process.Kill() // may have ended by itself
		_, waitErr := process.Wait()
		return nil, output, errors.Join(err, waitErr)
	}
	output = [2]*os.File{pipes[2][0], pipes[3][0]}
	pipes[2][0], pipes[3][0] = nil, nil // handed on
	return process, output, nil
}

// namespacesOf says which of the pod's namespaces a container enters and which new ones it gets.
func (s *server) namespacesOf(p *sandbox, c *container) (*network.Namespaces, uintptr, error) {
	flags := uintptr(syscall.CLONE_NEWNS)
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.namespaces == nil {
		return nil, 0, errors.New("the pod has been stopped")
	}
	ns := *p.namespaces
	switch o := c.security().GetNamespaceOptions(); o.GetPid() {
	case v1.NamespaceMode_CONTAINER:
		ns.PID = nil
		flags |= syscall.CLONE_NEWPID
	case v1.NamespaceMode_NODE:
		ns.PID = nil
	case v1.NamespaceMode_TARGET:
		target := s.containers[o.TargetId]
		if target == nil || target.pid == 0 {
			return nil, 0, fmt.Errorf("target container %q is not running", o.TargetId)
		}
		var err error
		if ns.PID, err = os.Open(fmt.Sprintf("/proc/%d/ns/pid", target.pid)); err != nil {
			return nil, 0, err
		}
	}
	return &ns, flags, nil
}

// follow is with a container to its end: it writes the log and records how it ended.
func (s *server) follow(c *container, process *os.Process, output [2]*os.File) {
	var copies sync.WaitGroup
	copies.Go(func() { c.log.copy(output[0], "stdout") })
	copies.Go(func() { c.log.copy(output[1], "stderr") })
	state, err := process.Wait()
	s.groups.Kill(c.ID) // processes that outlive the first one, in a shared process namespace
	drained := make(chan struct{})
	go func() { copies.Wait(); close(drained) }()
	select {
	case <-drained:
	case <-time.After(drainLimit):
	}
	output[0].Close()
	output[1].Close()
	oom := s.groups.OOMKilled(c.ID)
	s.groups.Remove(c.ID)

	s.mu.Lock()
	c.pid, c.Finished, c.State = 0, now(), v1.ContainerState_CONTAINER_EXITED
	c.ExitCode, c.Reason = exitCode(state), "Completed"
	switch {
	case err != nil:
		c.Reason, c.Message = "Error", err.Error()
	case c.ExitCode != 0 && oom:
		c.Reason = "OOMKilled"
	case c.ExitCode != 0:
		c.Reason = "Error"
	}
	if err := s.save(containerKind, c.ID, c); err != nil {
		fmt.Fprintf(os.Stderr, "how container %s ended will be forgotten with this process: %v\n", c.ID, err)
	}
	s.mu.Unlock()
	close(c.done)
}

// exitCode as shells and Kubernetes count: 128 and the signal for a process that was killed.
func exitCode(state *os.ProcessState) int32 {
	if state == nil {
		return 255
	}
	if ws := state.Sys().(syscall.WaitStatus); ws.Signaled() {
		return 128 + int32(ws.Signal())
	}
	return int32(state.ExitCode())
}
