package supervisor

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"a.localcluster/cgroup"
	"a.localcluster/layout"
	"a.localcluster/network"
)

// containerdPrograms lie in the directory that --containerd names; CNI's plugins are among them.
var containerdPrograms = []string{"containerd", "containerd-shim-runc-v2", "bridge", "host-local", "loopback"}

// PauseImage is what holds a pod's namespaces. Whoever uses containerd imports one of this name.
const PauseImage = "localhost/pause:1"

// checkContainerd refuses what can't work with containerd, or without it.
func (o *Options) checkContainerd() error {
	if o.Containerd == "" {
		if o.Services {
			return fmt.Errorf("--services: needs --containerd, in whose directory CoreDNS is")
		}
		return nil
	}
	if !slices.Equal(o.IPFamilies, []string{network.IPv4.Name}) {
		return fmt.Errorf("--ip-families: with containerd, pods here have addresses of IPv4 alone")
	}
	if o.Images != "" {
		return fmt.Errorf("--images: is of the runtime of our own, and containerd has its images imported")
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("--containerd: needs root")
	}
	var err error
	if o.Containerd, err = filepath.Abs(o.Containerd); err != nil {
		return err
	}
	programs, onPath := containerdPrograms, []string{"runc"}
	if o.Services {
		programs, onPath = slices.Concat(programs, []string{"coredns"}), append(onPath, "nft")
	}
	for _, each := range programs {
		if _, err := exec.LookPath(filepath.Join(o.Containerd, each)); err != nil {
			return fmt.Errorf("--containerd %s: %w", o.Containerd, err)
		}
	}
	for _, each := range onPath {
		if _, err := exec.LookPath(each); err != nil {
			return fmt.Errorf("the program %q is missing, which containers or Services need: %w", each, err)
		}
	}
	return nil
}

// containerdConfig: no score for the kernel's OOM killer is lowered, which takes a capability that root may lack.
const containerdConfig = `version = 3
root = "%[1]s/root"
state = "%[1]s/state"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "%[2]s"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "%[3]s"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  enable_cdi = true
  cdi_spec_dirs = ["%[4]s"]
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["%[5]s"]
    conf_dir = "%[1]s/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    runtime_path = "%[5]s/containerd-shim-runc-v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
`

// cniConfig puts pods on the bridge that is there, with the addresses and the one route that the other runtime gives them.
const cniConfig = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "%[1]s", "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "%[2]s/addresses",
     "ranges": [[{"subnet": "%[3]s", "rangeStart": "%[4]s", "rangeEnd": "%[5]s", "gateway": "%[6]s"}]],
     "routes": [{"dst": "%[7]s"}]}}]}
`

// containerd readies a node for it and returns the component.
func containerd(o Options, n layout.Node, ns *nodeNamespaces) (*component, error) {
	if err := cgroup.MakeForKubelet(n.Dir.Tag(), n.Name()); err != nil {
		return nil, err
	}
	at := n.Runtime()
	if err := os.MkdirAll(filepath.Join(at, "cni"), 0o755); err != nil {
		return nil, err
	}
	for name, text := range map[string]string{
		"config.toml": fmt.Sprintf(containerdConfig, at, n.Socket(), PauseImage, n.CDI(), o.Containerd),
		"cni/10-pods.conflist": fmt.Sprintf(cniConfig, network.Bridge, at, network.IPv4.PodCIDR, network.IPv4.PodIP(n.Index, 1),
			network.IPv4.PodIP(n.Index, network.PodsPerNode), network.IPv4.NodeIP(n.Index), network.IPv4.ServiceCIDR),
	} {
		if err := os.WriteFile(filepath.Join(at, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	return &component{name: n.ComponentName("containerd"), node: ns,
		program: filepath.Join(o.Containerd, "containerd"), args: []string{"--config=" + filepath.Join(at, "config.toml")}}, nil
}
