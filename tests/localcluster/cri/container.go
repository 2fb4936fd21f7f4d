package cri

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/uuid"
	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// container is one container of a sandbox. The exported fields are the record.
type container struct {
	ID, Sandbox, Image         string
	Config                     *v1.ContainerConfig
	Created, Started, Finished int64
	State                      v1.ContainerState
	ExitCode                   int32
	Reason, Message            string
	Account                    account

	image *image
	env   []string // as its command has it
	caps  capabilitySet
	pid   int // 0: not running
	log   *logFile
	done  chan struct{} // closed when it has ended
}

func (c *container) security() *v1.LinuxContainerSecurityContext {
	return c.Config.GetLinux().GetSecurityContext()
}

// containersOf lists the containers of a sandbox.
func (s *server) containersOf(sandbox string) (ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, c := range s.containers {
		if c.Sandbox == sandbox {
			ids = append(ids, id)
		}
	}
	return ids
}

// running finds a container and its process.
func (s *server) running(id string) (*container, int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	if c == nil {
		return nil, 0, status.Error(codes.NotFound, "no such container")
	}
	if c.pid == 0 {
		return nil, 0, status.Error(codes.NotFound, "the container is not running")
	}
	return c, c.pid, nil
}

func (s *server) CreateContainer(_ context.Context, q *v1.CreateContainerRequest) (*v1.CreateContainerResponse, error) {
	i, err := s.images.find(q.Config.Image.Image)
	if err != nil {
		return nil, err
	}
	c := &container{ID: string(uuid.NewUUID()), Sandbox: q.PodSandboxId, Config: q.Config, Created: now(), image: i,
		Image: q.Config.Image.Image, State: v1.ContainerState_CONTAINER_CREATED, done: make(chan struct{})}
	if c.Account, err = whoRuns(i, c.security()); err != nil {
		return nil, err
	}
	if c.caps, err = capabilities(c.security()); err != nil {
		return nil, err
	}
	c.Config.LogPath = filepath.Join(q.SandboxConfig.LogDirectory, q.Config.LogPath)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sandboxes[q.PodSandboxId] == nil {
		return nil, status.Error(codes.NotFound, "no such sandbox")
	}
	s.containers[c.ID] = c
	return &v1.CreateContainerResponse{ContainerId: c.ID}, s.save(containerKind, c.ID, c)
}

func (s *server) StartContainer(_ context.Context, q *v1.StartContainerRequest) (*v1.StartContainerResponse, error) {
	s.mu.Lock()
	c := s.containers[q.ContainerId]
	var p *sandbox
	if c != nil {
		p = s.sandboxes[c.Sandbox]
	}
	stopped := p == nil || p.namespaces == nil
	s.mu.Unlock()
	if c == nil || stopped {
		return nil, status.Error(codes.NotFound, "no such container, or its sandbox has stopped")
	}
	if err := s.launch(p, c); err != nil {
		s.mu.Lock()
		c.State, c.Reason, c.Message, c.ExitCode = v1.ContainerState_CONTAINER_EXITED, "StartError", err.Error(), 128
		c.Started, c.Finished = now(), now()
		saved := s.save(containerKind, c.ID, c)
		s.mu.Unlock()
		s.groups.Remove(c.ID)
		close(c.done)
		return nil, errors.Join(err, saved)
	}
	return &v1.StartContainerResponse{}, nil
}

// stop ends a container and returns when it has ended: first by its stop signal, past the timeout by force.
func (s *server) stop(id string, timeout time.Duration) {
	c, pid, err := s.running(id)
	if err != nil {
		return // not running: as wanted
	}
	if timeout > 0 {
		_ = syscall.Kill(pid, syscall.SIGTERM) // ended meanwhile: as wanted
		select {
		case <-c.done:
			return
		case <-time.After(timeout):
		}
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	s.groups.Kill(id)
	<-c.done
}

func (s *server) StopContainer(_ context.Context, q *v1.StopContainerRequest) (*v1.StopContainerResponse, error) {
	s.stop(q.ContainerId, time.Duration(q.Timeout)*time.Second)
	return &v1.StopContainerResponse{}, nil
}

func (s *server) RemoveContainer(_ context.Context, q *v1.RemoveContainerRequest) (*v1.RemoveContainerResponse, error) {
	s.stop(q.ContainerId, 0)
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[q.ContainerId]
	if c == nil {
		return &v1.RemoveContainerResponse{}, nil
	}
	delete(s.containers, q.ContainerId)
	if c.log != nil {
		c.log.close()
	}
	if err := os.Remove(c.Config.LogPath); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	return &v1.RemoveContainerResponse{}, s.forget(containerKind, q.ContainerId)
}

func (s *server) ListContainers(_ context.Context, q *v1.ListContainersRequest) (*v1.ListContainersResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &v1.ListContainersResponse{}
	f := q.GetFilter()
	for _, c := range s.containers {
		if f.GetId() != "" && f.GetId() != c.ID || f.GetPodSandboxId() != "" && f.GetPodSandboxId() != c.Sandbox ||
			f.GetState() != nil && f.GetState().State != c.State || !matches(c.Config.Labels, f.GetLabelSelector()) {
			continue
		}
		out.Containers = append(out.Containers, &v1.Container{Id: c.ID, PodSandboxId: c.Sandbox, Metadata: c.Config.Metadata,
			Image: c.Config.Image, ImageRef: c.Image, ImageId: c.Image, State: c.State, CreatedAt: c.Created,
			Labels: c.Config.Labels, Annotations: c.Config.Annotations})
	}
	return out, nil
}

func (s *server) ContainerStatus(_ context.Context, q *v1.ContainerStatusRequest) (*v1.ContainerStatusResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[q.ContainerId]
	if c == nil {
		return nil, status.Error(codes.NotFound, "no such container")
	}
	user := &v1.LinuxContainerUser{Uid: int64(c.Account.UID), Gid: int64(c.Account.GID)}
	for _, g := range c.Account.Groups {
		user.SupplementalGroups = append(user.SupplementalGroups, int64(g))
	}
	return &v1.ContainerStatusResponse{Status: &v1.ContainerStatus{Id: c.ID, Metadata: c.Config.Metadata, State: c.State,
		CreatedAt: c.Created, StartedAt: c.Started, FinishedAt: c.Finished, ExitCode: c.ExitCode, Image: c.Config.Image,
		ImageRef: c.Image, ImageId: c.Image, Reason: c.Reason, Message: c.Message, Labels: c.Config.Labels,
		Annotations: c.Config.Annotations, Mounts: c.Config.Mounts, LogPath: c.Config.LogPath, User: &v1.ContainerUser{Linux: user}}}, nil
}

func (s *server) UpdateContainerResources(context.Context, *v1.UpdateContainerResourcesRequest) (*v1.UpdateContainerResourcesResponse, error) {
	return &v1.UpdateContainerResourcesResponse{}, nil
}

// ReopenContainerLog follows the kubelet, which has moved the log away because it grew too long.
func (s *server) ReopenContainerLog(_ context.Context, q *v1.ReopenContainerLogRequest) (*v1.ReopenContainerLogResponse, error) {
	c, _, err := s.running(q.ContainerId)
	if err != nil {
		return nil, err
	}
	return &v1.ReopenContainerLogResponse{}, c.log.open()
}
