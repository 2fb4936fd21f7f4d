package cri

import (
	"path/filepath"
	"reflect"
	"testing"

	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func rootWithUsers(t *testing.T) string {
	root := t.TempDir()
	writeFile(t, filepath.Join(root, "etc/passwd"), "root:x:0:0::/root:/bin/sh\nme:x:1000:1001::/home/me:/bin/sh\n")
	writeFile(t, filepath.Join(root, "etc/group"), "root:x:0:\nvideo:x:44:me,you\nrender:x:45:you\n")
	return root
}

func number(n int64) *v1.Int64Value { return &v1.Int64Value{Value: n} }

func TestAccountOfAContainer(t *testing.T) {
	root := rootWithUsers(t)
	for name, c := range map[string]struct {
		user string
		sc   *v1.LinuxContainerSecurityContext
		want account
	}{
		"nothing said":             {"", &v1.LinuxContainerSecurityContext{}, account{0, 0, []int{0}, "/root"}},
		"image's user by name":     {"me", &v1.LinuxContainerSecurityContext{}, account{1000, 1001, []int{44, 1001}, "/home/me"}},
		"image's user and group":   {"me:video", &v1.LinuxContainerSecurityContext{}, account{1000, 44, []int{44}, "/home/me"}},
		"number without an entry":  {"65532:65533", &v1.LinuxContainerSecurityContext{}, account{65532, 65533, []int{65533}, "/"}},
		"the kubelet repeats it":   {"65532:65533", &v1.LinuxContainerSecurityContext{RunAsUser: number(65532)}, account{65532, 65533, []int{65533}, "/"}},
		"runAsUser wins":           {"me", &v1.LinuxContainerSecurityContext{RunAsUser: number(7)}, account{7, 0, []int{0}, "/"}},
		"runAsGroup, other groups": {"me", &v1.LinuxContainerSecurityContext{RunAsGroup: number(9), SupplementalGroups: []int64{3, 9}}, account{1000, 9, []int{3, 9, 44}, "/home/me"}},
		"only the pod's groups": {"me", &v1.LinuxContainerSecurityContext{SupplementalGroups: []int64{3}, SupplementalGroupsPolicy: v1.SupplementalGroupsPolicy_Strict},
			account{1000, 1001, []int{3, 1001}, "/home/me"}},
	} {
		got, err := whoRuns(&image{Root: root, User: c.user}, c.sc)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %+v, %v, want %+v", name, got, err, c.want)
		}
	}
}

func TestAccountThatIsNotThereIsRefused(t *testing.T) {
	root := rootWithUsers(t)
	for name, c := range map[string]struct {
		user string
		sc   *v1.LinuxContainerSecurityContext
	}{
		"user":                      {"nobody-here", &v1.LinuxContainerSecurityContext{}},
		"group":                     {"me:none", &v1.LinuxContainerSecurityContext{}},
		"runAsGroup without a user": {"", &v1.LinuxContainerSecurityContext{RunAsGroup: number(9)}},
	} {
		if got, err := whoRuns(&image{Root: root, User: c.user}, c.sc); err == nil {
			t.Errorf("%s: got %+v", name, got)
		}
	}
}

func TestCapabilities(t *testing.T) {
	set := func(add, drop []string) *v1.LinuxContainerSecurityContext {
		return &v1.LinuxContainerSecurityContext{Capabilities: &v1.Capability{AddCapabilities: add, DropCapabilities: drop}}
	}
	for name, c := range map[string]struct {
		sc   *v1.LinuxContainerSecurityContext
		want capabilitySet
	}{
		"default":                {set(nil, nil), 0xa80425fb}, // as /proc shows it under containerd
		"none":                   {set(nil, []string{"ALL"}), 0},
		"none but one":           {set([]string{"KILL"}, []string{"ALL"}), 1 << 5},
		"all":                    {set([]string{"ALL"}, nil), everyCapability},
		"one less":               {set(nil, []string{"cap_chown"}), 0xa80425fa},
		"privileged":             {&v1.LinuxContainerSecurityContext{Privileged: true}, everyCapability},
		"one more, once dropped": {set([]string{"SYS_ADMIN"}, []string{"SYS_ADMIN"}), 0xa80425fb},
	} {
		if got, err := capabilities(c.sc); err != nil || got != c.want {
			t.Errorf("%s: got %x, %v, want %x", name, got, err, c.want)
		}
	}
	if got, err := capabilities(set([]string{"FLY"}, nil)); err == nil {
		t.Errorf("an unknown one gives %x", got)
	}
}
