// Package cri is a Container Runtime Interface whose containers are processes of this machine.
//
// It does what the kubelet asks of a runtime, with namespaces, an overlay and the control groups; an image is a directory
// of the machine by another name, so nothing is pulled or copied. Its containers end with it: it reports them as exited
// when it comes back, and the kubelet starts the pods anew, as after a reboot. It keeps that record in the node's
// directory, one JSON file for each pod and container.
package cri

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming"

	"a.localcluster/box"
	"a.localcluster/cgroup"
	"a.localcluster/layout"
	"a.localcluster/network"
)

// server answers the kubelet. Its maps and what they hold are guarded by mu.
type server struct {
	v1.UnimplementedRuntimeServiceServer
	v1.UnimplementedImageServiceServer
	node     layout.Node
	families []network.Family
	images   imageFile
	groups   *cgroup.Groups
	forks    chan func() // run on the one thread that starts containers
	streams  streaming.Server

	mu         sync.Mutex
	sandboxes  map[string]*sandbox
	containers map[string]*container
	lastNumber int
}

// farewell is what containers get to end by themselves when the cluster ends.
const farewell = 3 * time.Second

// Main serves the kubelet of one node until it is told to end.
func Main(args []string) error {
	flags := flag.NewFlagSet("cri", flag.ContinueOnError)
	dir := flags.String("dir", "", "directory of the cluster")
	index := flags.Int("node", 1, "number of the node")
	images := flags.String("images", "", "file of image names")
	named := flags.String("ip-families", network.IPv4.Name, "of pods' addresses")
	if err := flags.Parse(args); err != nil {
		return err
	}
	families, err := network.FamiliesOf(strings.Split(*named, ","))
	if err != nil {
		return err
	}
	node := layout.Node{Dir: layout.Dir(*dir), Index: *index}
	s := &server{node: node, families: families, images: imageFile(*images), groups: cgroup.Find(node.Dir.Tag()).Below(node.Name()), forks: make(chan func()),
		sandboxes: map[string]*sandbox{}, containers: map[string]*container{}}
	if !s.groups.Limits() {
		fmt.Fprintln(os.Stderr, "no memory cgroup can be made here: memory limits will be ignored")
	}
	if box.OneUser {
		fmt.Fprintln(os.Stderr, "this cluster has one user, who started it: a container that asks for another fails to start")
	}
	if err := s.recover(); err != nil {
		return err
	}
	go func() {
		// One thread starts all containers and never ends: their parent-death signal follows the thread.
		runtime.LockOSThread()
		for f := range s.forks {
			f()
		}
	}()
	return s.serve()
}

func (s *server) serve() error {
	streams, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	cfg := streaming.DefaultConfig
	cfg.Addr = streams.Addr().String()
	if err := streams.Close(); err != nil { // the streaming server opens its own; nobody else is in this network to take the port
		return err
	}
	if s.streams, err = streaming.NewServer(cfg, streamer{s}); err != nil {
		return err
	}
	failed := make(chan error, 2)
	go func() { failed <- s.streams.Start(true) }()

	g := grpc.NewServer()
	v1.RegisterRuntimeServiceServer(g, s)
	v1.RegisterImageServiceServer(g, s)
	if err := os.Remove(s.node.Socket()); err != nil && !os.IsNotExist(err) {
		return err
	}
	socket, err := net.Listen("unix", s.node.Socket())
	if err != nil {
		return err
	}
	go func() { failed <- g.Serve(socket) }()

	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	select {
	case err := <-failed:
		return fmt.Errorf("the runtime can't serve: %w", err)
	case <-ctx.Done():
	}
	g.Stop()
	s.endAll()
	return s.groups.RemoveAll()
}

// endAll ends every container, all at once.
func (s *server) endAll() {
	s.mu.Lock()
	ids := make([]string, 0, len(s.containers))
	for id := range s.containers {
		ids = append(ids, id)
	}
	s.mu.Unlock()
	var ended sync.WaitGroup
	for _, id := range ids {
		ended.Go(func() { s.stop(id, farewell) })
	}
	ended.Wait()
}

// recover reads what a runtime of before left. Its containers ended with it, so they are reported as exited and their pods
// as not ready: the kubelet then makes new ones.
func (s *server) recover() error {
	for _, d := range []string{sandboxKind, containerKind, "scratch"} {
		if err := os.MkdirAll(s.node.Path("runtime", d), 0o700); err != nil {
			return err
		}
	}
	if err := readRecords(s, sandboxKind, func(p *sandbox) error {
		p.Ready = false
		s.sandboxes[p.ID] = p
		return errors.Join(s.free(p), s.save(sandboxKind, p.ID, p))
	}); err != nil {
		return err
	}
	return readRecords(s, containerKind, func(c *container) error {
		c.done = make(chan struct{})
		close(c.done)
		if c.State != v1.ContainerState_CONTAINER_EXITED {
			c.State, c.ExitCode, c.Finished = v1.ContainerState_CONTAINER_EXITED, 137, now()
			c.Reason, c.Message = "RuntimeRestarted", "the container ended with the runtime that ran it"
		}
		s.containers[c.ID] = c
		s.groups.Kill(c.ID) // one that a process namespace did not end: it shared the node's
		s.groups.Remove(c.ID)
		return s.save(containerKind, c.ID, c)
	})
}

func (s *server) Version(context.Context, *v1.VersionRequest) (*v1.VersionResponse, error) {
	return &v1.VersionResponse{Version: "0.1.0", RuntimeName: "localcluster", RuntimeVersion: "1.0.0", RuntimeApiVersion: "v1"}, nil
}

func (s *server) Status(context.Context, *v1.StatusRequest) (*v1.StatusResponse, error) {
	return &v1.StatusResponse{
		Status: &v1.RuntimeStatus{Conditions: []*v1.RuntimeCondition{
			{Type: v1.RuntimeReady, Status: true}, {Type: v1.NetworkReady, Status: true}}},
		RuntimeHandlers: []*v1.RuntimeHandler{{Features: &v1.RuntimeHandlerFeatures{RecursiveReadOnlyMounts: true}}},
		Features:        &v1.RuntimeFeatures{SupplementalGroupsPolicy: true}}, nil
}

func (s *server) RuntimeConfig(context.Context, *v1.RuntimeConfigRequest) (*v1.RuntimeConfigResponse, error) {
	return &v1.RuntimeConfigResponse{Linux: &v1.LinuxRuntimeConfiguration{CgroupDriver: v1.CgroupDriver_CGROUPFS}}, nil
}

func (s *server) UpdateRuntimeConfig(context.Context, *v1.UpdateRuntimeConfigRequest) (*v1.UpdateRuntimeConfigResponse, error) {
	return &v1.UpdateRuntimeConfigResponse{}, nil
}

// path of something that the runtime keeps.
func (s *server) path(parts ...string) string {
	return filepath.Join(append([]string{s.node.Runtime()}, parts...)...)
}

func now() int64 { return time.Now().UnixNano() }
