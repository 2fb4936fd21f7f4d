package cri

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/uuid"
	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"a.localcluster/box"
	"a.localcluster/layout"
	"a.localcluster/network"
)

// sandbox is a pod as the runtime sees it: namespaces that its containers share. The exported fields are the record.
type sandbox struct {
	ID      string
	Number  int // of its addresses
	Config  *v1.PodSandboxConfig
	Created int64
	Ready   bool

	namespaces *network.Namespaces
	pause      *os.Process // pid 1 of a shared process namespace
}

// shmSize is a pod's /dev/shm, as other runtimes give; a pod that needs more mounts an emptyDir of medium Memory there.
const shmSize = 64 << 20

func (p *sandbox) namespaceOptions() *v1.NamespaceOption {
	return p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions()
}

func (p *sandbox) hostNetwork() bool {
	return p.namespaceOptions().GetNetwork() == v1.NamespaceMode_NODE
}

func (p *sandbox) state() v1.PodSandboxState {
	if p.Ready {
		return v1.PodSandboxState_SANDBOX_READY
	}
	return v1.PodSandboxState_SANDBOX_NOTREADY
}

// takeNumber picks the next one that no ready pod has, so that an address is not used again soon. Called with the lock.
func (s *server) takeNumber() (int, error) {
	used := map[int]bool{}
	for _, p := range s.sandboxes {
		if p.Ready {
			used[p.Number] = true
		}
	}
	for range network.PodsPerNode {
		s.lastNumber = s.lastNumber%network.PodsPerNode + 1
		if !used[s.lastNumber] {
			return s.lastNumber, nil
		}
	}
	return 0, errors.New("no pod address is free")
}

// address of a sandbox in a family: that of its node, if it has the node's network.
func (s *server) address(p *sandbox, f network.Family) string {
	if p.hostNetwork() {
		return f.NodeIP(s.node.Index)
	}
	return f.PodIP(s.node.Index, p.Number)
}

func (s *server) addresses(p *sandbox) *v1.PodSandboxNetworkStatus {
	out := &v1.PodSandboxNetworkStatus{Ip: s.address(p, s.families[0])}
	for _, f := range s.families[1:] {
		out.AdditionalIps = append(out.AdditionalIps, &v1.PodIP{Ip: s.address(p, f)})
	}
	return out
}

func (s *server) RunPodSandbox(_ context.Context, q *v1.RunPodSandboxRequest) (*v1.RunPodSandboxResponse, error) {
	p := &sandbox{ID: string(uuid.NewUUID()), Config: q.Config, Created: now(), Ready: true}
	s.mu.Lock()
	var err error
	if !p.hostNetwork() {
		p.Number, err = s.takeNumber()
	}
	if err == nil {
		s.sandboxes[p.ID] = p
	}
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err = s.makeSandbox(p); err == nil {
		err = s.save(sandboxKind, p.ID, p)
	}
	if err != nil {
		err = errors.Join(err, s.free(p))
		s.mu.Lock()
		delete(s.sandboxes, p.ID)
		s.mu.Unlock()
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	return &v1.RunPodSandboxResponse{PodSandboxId: p.ID}, nil
}

func (s *server) makeSandbox(p *sandbox) (err error) {
	if p.Config.LogDirectory != "" {
		if err := os.MkdirAll(p.Config.LogDirectory, 0o755); err != nil {
			return err
		}
	}
	p.namespaces, err = network.Pod{ID: p.ID, Hostname: p.Config.Hostname, Families: s.families, Node: s.node.Index, Number: p.Number,
		HostNetwork: p.hostNetwork(), HostIPC: p.namespaceOptions().GetIpc() == v1.NamespaceMode_NODE, Sysctls: p.Config.GetLinux().GetSysctls()}.Make()
	if err != nil {
		return err
	}
	dir := s.path(sandboxKind, p.ID)
	if err := os.MkdirAll(dir+"/shm", 0o755); err != nil {
		return err
	}
	if err := syscall.Mount("shm", dir+"/shm", "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, fmt.Sprintf("mode=1777,size=%d", shmSize)); err != nil {
		return fmt.Errorf("shared memory: %w", err)
	}
	hostname := p.Config.Hostname
	if p.hostNetwork() || hostname == "" {
		hostname = s.node.Name()
	}
	if err := os.WriteFile(dir+"/hostname", []byte(hostname+"\n"), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(dir+"/resolv.conf", resolvConf(p.Config.GetDnsConfig()), 0o644); err != nil {
		return err
	}
	if p.namespaceOptions().GetPid() == v1.NamespaceMode_POD {
		return s.startPause(p)
	}
	return nil
}

func resolvConf(dns *v1.DNSConfig) []byte {
	var out bytes.Buffer
	for _, n := range dns.GetServers() {
		fmt.Fprintln(&out, "nameserver", n)
	}
	if l := dns.GetSearches(); len(l) > 0 {
		fmt.Fprintln(&out, "search", strings.Join(l, " "))
	}
	if l := dns.GetOptions(); len(l) > 0 {
		fmt.Fprintln(&out, "options", strings.Join(l, " "))
	}
	return out.Bytes()
}

func (s *server) startPause(p *sandbox) error {
	return s.fork(p.namespaces, func() error {
		pause, err := os.StartProcess(layout.Self, []string{box.PauseArg0}, &os.ProcAttr{
			Env: []string{"GOGC=off", "GOMAXPROCS=1"},
			Sys: &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL, Setsid: true}})
		if err != nil {
			return err
		}
		p.pause = pause
		p.namespaces.PID, err = os.Open(fmt.Sprintf("/proc/%d/ns/pid", pause.Pid))
		return err
	})
}

// free gives back what a sandbox holds but its record. It may be called again.
func (s *server) free(p *sandbox) error {
	s.mu.Lock()
	pause, namespaces := p.pause, p.namespaces
	p.pause, p.namespaces = nil, nil
	s.mu.Unlock()
	if pause != nil {
		_ = pause.Kill() // may have ended with the last of its containers
		if _, err := pause.Wait(); err != nil {
			return err
		}
	}
	if namespaces != nil {
		network.RemoveInterface(p.ID)
		namespaces.Close()
	}
	dir := s.path(sandboxKind, p.ID)
	for syscall.Unmount(dir+"/shm", syscall.MNT_DETACH) == nil { // until it is no mount any more
	}
	return os.RemoveAll(dir)
}

func (s *server) StopPodSandbox(_ context.Context, q *v1.StopPodSandboxRequest) (*v1.StopPodSandboxResponse, error) {
	for _, id := range s.containersOf(q.PodSandboxId) {
		s.stop(id, 0)
	}
	s.mu.Lock()
	p := s.sandboxes[q.PodSandboxId]
	s.mu.Unlock()
	if p == nil {
		return &v1.StopPodSandboxResponse{}, nil
	}
	if err := s.free(p); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p.Ready = false
	return &v1.StopPodSandboxResponse{}, s.save(sandboxKind, p.ID, p)
}

func (s *server) RemovePodSandbox(ctx context.Context, q *v1.RemovePodSandboxRequest) (*v1.RemovePodSandboxResponse, error) {
	if _, err := s.StopPodSandbox(ctx, &v1.StopPodSandboxRequest{PodSandboxId: q.PodSandboxId}); err != nil {
		return nil, err
	}
	for _, id := range s.containersOf(q.PodSandboxId) {
		if _, err := s.RemoveContainer(ctx, &v1.RemoveContainerRequest{ContainerId: id}); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sandboxes, q.PodSandboxId)
	return &v1.RemovePodSandboxResponse{}, s.forget(sandboxKind, q.PodSandboxId)
}

func (s *server) PodSandboxStatus(_ context.Context, q *v1.PodSandboxStatusRequest) (*v1.PodSandboxStatusResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.sandboxes[q.PodSandboxId]
	if p == nil {
		return nil, status.Error(codes.NotFound, "no such sandbox")
	}
	return &v1.PodSandboxStatusResponse{Status: &v1.PodSandboxStatus{Id: p.ID, Metadata: p.Config.Metadata, State: p.state(),
		CreatedAt: p.Created, Network: s.addresses(p), Labels: p.Config.Labels, Annotations: p.Config.Annotations,
		Linux: &v1.LinuxPodSandboxStatus{Namespaces: &v1.Namespace{Options: p.namespaceOptions()}}}}, nil
}

func (s *server) ListPodSandbox(_ context.Context, q *v1.ListPodSandboxRequest) (*v1.ListPodSandboxResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &v1.ListPodSandboxResponse{}
	f := q.GetFilter()
	for _, p := range s.sandboxes {
		if f.GetId() != "" && f.GetId() != p.ID || f.GetState() != nil && f.GetState().State != p.state() || !matches(p.Config.Labels, f.GetLabelSelector()) {
			continue
		}
		out.Items = append(out.Items, &v1.PodSandbox{Id: p.ID, Metadata: p.Config.Metadata, State: p.state(), CreatedAt: p.Created,
			Labels: p.Config.Labels, Annotations: p.Config.Annotations})
	}
	return out, nil
}

func matches(labels, selector map[string]string) bool {
	for k, v := range selector {
		if labels[k] != v {
			return false
		}
	}
	return true
}

// The kubelet asks for statistics all the time; there are none here.

func (s *server) ListPodSandboxStats(context.Context, *v1.ListPodSandboxStatsRequest) (*v1.ListPodSandboxStatsResponse, error) {
	return &v1.ListPodSandboxStatsResponse{}, nil
}

func (s *server) ListContainerStats(context.Context, *v1.ListContainerStatsRequest) (*v1.ListContainerStatsResponse, error) {
	return &v1.ListContainerStatsResponse{}, nil
}
