package devices

import (
	"os"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"a.localcluster/box"
	"a.localcluster/layout"
)

func TestDeviceIsFoundByItsNameAndApplied(t *testing.T) {
	node := layout.Node{Dir: layout.Dir(t.TempDir()), Index: 1}
	if err := os.MkdirAll(node.CDI(), 0o755); err != nil {
		t.Fatal(err)
	}
	text := `{"cdiVersion": "0.6.0", "kind": "example.com/gpu", "containerEdits": {"env": ["ALL=1"]}, "devices": [
		{"name": "0", "containerEdits": {"env": ["ONE=1"], "deviceNodes": [{"path": "/dev/gpu0"}],
		 "mounts": [{"hostPath": "/lib/gpu", "containerPath": "/gpu", "options": ["ro", "bind"]}]}}]}`
	if err := os.WriteFile(node.Path("cdi", "a.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	edits, err := Edits(node, "example.com/gpu=0")
	if err != nil {
		t.Fatal(err)
	}
	var got box.Spec
	edits.Apply(&got)
	want := box.Spec{Env: []string{"ALL=1", "ONE=1"}, Devices: []string{"/dev/gpu0"},
		Mounts: []box.Mount{{Source: "/lib/gpu", Target: "/gpu", Readonly: true}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if edits, err := Edits(node, "example.com/gpu=1"); err == nil {
		t.Errorf("an absent device is %+v", edits)
	}
}

func TestNodeIsLeftAloneOnlyWithTheRightNumbers(t *testing.T) {
	wanted := map[string]string{"nvidia.com/gpu": "8"}
	list := func(n string) corev1.ResourceList {
		return corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(n)}
	}
	for name, c := range map[string]struct {
		status corev1.NodeStatus
		want   bool
	}{
		"not there":            {corev1.NodeStatus{}, false},
		"as wanted":            {corev1.NodeStatus{Capacity: list("8"), Allocatable: list("8")}, true},
		"reset by the kubelet": {corev1.NodeStatus{Capacity: list("0"), Allocatable: list("0")}, false},
		"not allocatable":      {corev1.NodeStatus{Capacity: list("8")}, false},
	} {
		if got := has(c.status, wanted); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
