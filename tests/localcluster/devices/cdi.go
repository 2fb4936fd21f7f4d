package devices

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"a.localcluster/box"
	"a.localcluster/layout"
)

// cdiSpec is the part of a Container Device Interface file that is known here.
type cdiSpec struct {
	CDIVersion string         `json:"cdiVersion"`
	Kind       string         `json:"kind"`
	Devices    []cdiDevice    `json:"devices"`
	Edits      ContainerEdits `json:"containerEdits"`
}

type cdiDevice struct {
	Name  string         `json:"name"`
	Edits ContainerEdits `json:"containerEdits"`
}

// ContainerEdits is what a device adds to a container.
type ContainerEdits struct {
	Env         []string     `json:"env,omitempty"`
	DeviceNodes []deviceNode `json:"deviceNodes,omitempty"`
	Mounts      []cdiMount   `json:"mounts,omitempty"`
}

type deviceNode struct {
	Path string `json:"path"`
}

type cdiMount struct {
	HostPath      string   `json:"hostPath"`
	ContainerPath string   `json:"containerPath"`
	Options       []string `json:"options"`
}

// Edits finds a device by its CDI name, KIND=DEVICE: in the node's directory, then in the machine's own ones.
func Edits(n layout.Node, name string) (ContainerEdits, error) {
	for _, dir := range []string{n.CDI(), "/etc/cdi", "/var/run/cdi"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.json"))
		if err != nil {
			return ContainerEdits{}, err
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				return ContainerEdits{}, err
			}
			var s cdiSpec
			if err := json.Unmarshal(text, &s); err != nil {
				return ContainerEdits{}, fmt.Errorf("%s: %w", f, err)
			}
			if e, ok := s.edits(name); ok {
				return e, nil
			}
		}
	}
	return ContainerEdits{}, fmt.Errorf("there is no CDI device %q", name)
}

func (s *cdiSpec) edits(name string) (ContainerEdits, bool) {
	for _, d := range s.Devices {
		if s.Kind+"="+d.Name == name {
			return ContainerEdits{
				Env:         slices.Concat(s.Edits.Env, d.Edits.Env),
				DeviceNodes: slices.Concat(s.Edits.DeviceNodes, d.Edits.DeviceNodes),
				Mounts:      slices.Concat(s.Edits.Mounts, d.Edits.Mounts),
			}, true
		}
	}
	return ContainerEdits{}, false
}

// Apply adds the device to a container.
func (e ContainerEdits) Apply(b *box.Spec) {
	b.Env = append(b.Env, e.Env...)
	for _, n := range e.DeviceNodes {
		b.Devices = append(b.Devices, n.Path)
	}
	for _, m := range e.Mounts {
		b.Mounts = append(b.Mounts, box.Mount{Source: m.HostPath, Target: m.ContainerPath, Readonly: slices.Contains(m.Options, "ro")})
	}
}
