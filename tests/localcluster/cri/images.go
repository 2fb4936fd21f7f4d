package cri

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/yaml"

	"a.localcluster/box"
)

// image is what a name stands for: a directory of this machine, and what an image's configuration would say.
type image struct {
	Root       string            `json:"root"` // "" or "/": this machine's own root
	Env        map[string]string `json:"env"`
	Entrypoint []string          `json:"entrypoint"`
	Cmd        []string          `json:"cmd"`
	WorkingDir string            `json:"workingDir"`
	User       string            `json:"user"`    // user[:group], names or numbers
	Binds      []string          `json:"binds"`   // /on/the/machine:/in/the/container[:ro], reachable for every user
	Devices    []string          `json:"devices"` // device files to show, as patterns
	Hide       []string          `json:"hide"`    // directories of root to show empty, below binds; see defaultHide
}

const (
	machineRoot = "/"
	anyName     = "*" // in the image file: stands for every name that is not listed
)

// defaultHide is for the machine's own root: other programs' files and sockets are no part of an image.
var defaultHide = []string{"/tmp", "/run"}

// imageFile is read at each look-up, so that images can be added while the cluster runs. Without one, every name is the
// machine's root.
type imageFile string

func (f imageFile) all() (map[string]image, error) {
	if f == "" {
		return map[string]image{anyName: {}}, nil
	}
	text, err := os.ReadFile(string(f))
	if err != nil {
		return nil, err
	}
	var content struct {
		Images map[string]image `json:"images"`
	}
	if err := yaml.UnmarshalStrict(text, &content); err != nil {
		return nil, fmt.Errorf("%s: %w", f, err)
	}
	return content.Images, nil
}

// find looks a name up: as written, without the tag that Kubernetes added, or as any name. A name that is not there is a
// NotFound that lists those that are.
func (f imageFile) find(name string) (*image, error) {
	all, err := f.all()
	if err != nil {
		return nil, err
	}
	for _, n := range []string{name, strings.TrimSuffix(name, ":latest"), anyName} {
		i, ok := all[n]
		if !ok {
			continue
		}
		if i.Root == "" {
			i.Root = machineRoot
		}
		if i.Root == machineRoot && i.Hide == nil {
			i.Hide = defaultHide
		}
		if st, err := os.Stat(i.Root); err != nil || !st.IsDir() {
			return nil, fmt.Errorf("image %q: its root %s is no directory of this machine", name, i.Root)
		}
		return &i, nil
	}
	var known []string
	for n := range all {
		known = append(known, n)
	}
	slices.Sort(known)
	return nil, status.Errorf(codes.NotFound, "image %q is not in %s, which has: %s", name, filepath.Base(string(f)), strings.Join(known, ", "))
}

// mounts reads the binds.
func (i *image) mounts() (out []box.Mount, err error) {
	for _, b := range i.Binds {
		f := strings.Split(b, ":")
		if len(f) < 2 || len(f) > 3 || !filepath.IsAbs(f[0]) || !filepath.IsAbs(f[1]) || len(f) == 3 && f[2] != "ro" {
			return nil, fmt.Errorf("bind %q is not /from:/to or /from:/to:ro", b)
		}
		out = append(out, box.Mount{Source: f[0], Target: f[1], Readonly: len(f) == 3})
	}
	return out, nil
}

// describe says to the kubelet who the image's user is, for runAsNonRoot.
func (i *image) describe(name string) *v1.Image {
	out := &v1.Image{Id: name, RepoTags: []string{name}, Size: 1, Spec: &v1.ImageSpec{Image: name}}
	user, _, _ := strings.Cut(i.User, ":")
	if uid, err := strconv.ParseInt(user, 10, 64); err == nil {
		out.Uid = &v1.Int64Value{Value: uid}
	} else {
		out.Username = user
	}
	return out
}

func (s *server) ListImages(context.Context, *v1.ListImagesRequest) (*v1.ListImagesResponse, error) {
	all, err := s.images.all()
	if err != nil {
		return nil, err
	}
	out := &v1.ListImagesResponse{}
	for name, i := range all {
		if name != anyName {
			out.Images = append(out.Images, i.describe(name))
		}
	}
	return out, nil
}

func (s *server) ImageStatus(_ context.Context, q *v1.ImageStatusRequest) (*v1.ImageStatusResponse, error) {
	i, err := s.images.find(q.Image.Image)
	if status.Code(err) == codes.NotFound {
		return &v1.ImageStatusResponse{}, nil // absent: the kubelet pulls
	}
	if err != nil {
		return nil, err
	}
	return &v1.ImageStatusResponse{Image: i.describe(q.Image.Image)}, nil
}

func (s *server) PullImage(_ context.Context, q *v1.PullImageRequest) (*v1.PullImageResponse, error) {
	if _, err := s.images.find(q.Image.Image); err != nil {
		return nil, err
	}
	return &v1.PullImageResponse{ImageRef: q.Image.Image}, nil
}

func (s *server) RemoveImage(context.Context, *v1.RemoveImageRequest) (*v1.RemoveImageResponse, error) {
	return &v1.RemoveImageResponse{}, nil
}

func (s *server) ImageFsInfo(context.Context, *v1.ImageFsInfoRequest) (*v1.ImageFsInfoResponse, error) {
	fs := []*v1.FilesystemUsage{{Timestamp: now(), FsId: &v1.FilesystemIdentifier{Mountpoint: "/"},
		UsedBytes: &v1.UInt64Value{Value: 1}, InodesUsed: &v1.UInt64Value{Value: 1}}}
	return &v1.ImageFsInfoResponse{ImageFilesystems: fs, ContainerFilesystems: fs}, nil
}
