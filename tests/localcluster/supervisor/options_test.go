package supervisor

import (
	"maps"
	"strings"
	"testing"

	"a.localcluster/layout"
)

func TestExtendedResourcesAreReadOrRefused(t *testing.T) {
	got, err := ParseExtendedResources([]string{"nvidia.com/gpu=8", "example.com/fpga=0"})
	if want := map[string]string{"nvidia.com/gpu": "8", "example.com/fpga": "0"}; err != nil || !maps.Equal(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
	for _, item := range []string{"nvidia.com/gpu", "gpu=8", "nvidia.com/gpu=x", "nvidia.com/gpu=-1", "nvidia.com/gpu=500m", "a b/c=1"} {
		if got, err := ParseExtendedResources([]string{item}); err == nil {
			t.Errorf("%q is %v", item, got)
		}
	}
}

func TestOptionsThatCanNotWorkAreRefused(t *testing.T) {
	good := Options{Dir: "/srv/cluster", Nodes: 1, Driver: "gpu.example.com", IPFamilies: []string{"IPv4"}}
	if err := good.Complete(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Options){
		"no node":            func(o *Options) { o.Nodes = 0 },
		"too many nodes":     func(o *Options) { o.Nodes = 100 },
		"port out of range":  func(o *Options) { o.Port = 70000 },
		"negative devices":   func(o *Options) { o.Devices = -1 },
		"no such image file": func(o *Options) { o.Images = "/no/such/file" },
		"too long":           func(o *Options) { o.Dir = layout.Dir("/" + strings.Repeat("x", 90)) },
		"a colon":            func(o *Options) { o.Dir = "/srv/a:b" },
		"no containerd":      func(o *Options) { o.Containerd = "/no/such/directory" },
		"only Services":      func(o *Options) { o.Services = true },
		"no such family":     func(o *Options) { o.IPFamilies = []string{"IPv5"} },
		"no kube-router":     func(o *Options) { o.Policies = "/no/such/file" },
		"no such release":    func(o *Options) { o.Kubernetes = "/no/such/directory" },
	} {
		bad := good
		change(&bad)
		if err := bad.Complete(); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestContainerdHasNoFileOfImages(t *testing.T) {
	images := t.TempDir() + "/images.yaml"
	writeText(t, images, "images: {}\n")
	o := Options{Dir: "/srv/cluster", Nodes: 1, Containerd: "/opt/containerd", Images: images, IPFamilies: []string{"IPv4"}}
	if err := o.Complete(); err == nil || !strings.Contains(err.Error(), "--images") {
		t.Errorf("got %v", err)
	}
}

func TestRunningClusterIsComparedWithTheOneAskedFor(t *testing.T) {
	running := Options{Dir: "/c", Nodes: 1, Port: 4321, ExtendedResources: map[string]string{}}
	same := Options{Dir: "/c", Nodes: 1} // any port
	if d := same.differences(running); len(d) > 0 {
		t.Errorf("found %q", d)
	}
	other := Options{Dir: "/c", Nodes: 2, Port: 1, FeatureGates: "A=true", RuntimeConfig: "a/v1=true", Containerd: "/opt/containerd", Services: true,
		Policies: "/opt/kube-router", IPFamilies: []string{"IPv6"}, Kubernetes: "/opt/kubernetes", ExtendedResources: map[string]string{"nvidia.com/gpu": "8"}}
	if d := other.differences(running); len(d) != 10 {
		t.Errorf("found %q", d)
	}
}

func TestProcStatusTellsParentAndPidsOfEachNamespace(t *testing.T) {
	parent, pids := parseProcStatus("Name:\tlocalcluster\nPid:\t812\nPPid:\t811\nNSpid:\t812\t7\n")
	if parent != 811 || strings.Join(pids, " ") != "812 7" {
		t.Errorf("got %d, %q", parent, pids)
	}
}

func TestTailBeginsWithAWholeLine(t *testing.T) {
	path := t.TempDir() + "/log"
	writeText(t, path, "first line\nsecond line\nthird\n")
	if got := tail(path, 20); got != "second line\nthird" && got != "third" {
		t.Errorf("got %q", got)
	}
	if got := tail(path, 1000); got != "first line\nsecond line\nthird" {
		t.Errorf("got %q", got)
	}
}
