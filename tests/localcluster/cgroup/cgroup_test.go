package cgroup

import (
	"slices"
	"testing"
)

const (
	mountsOfVersion1 = `30 25 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/memory rw,nosuid shared:10 - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:11 - cgroup cgroup rw,cpu,cpuacct
`
	mountOfVersion2 = "25 20 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
)

func TestHierarchiesOfBothVersionsAreFound(t *testing.T) {
	v1 := hierarchy{at: "/sys/fs/cgroup/memory", own: "/session/7"}
	for name, c := range map[string]struct {
		mountinfo, self string
		want            []hierarchy
	}{
		"none":      {"", "", nil},
		"version 1": {mountsOfVersion1, "4:memory:/session/7\n1:cpu:/\n0::/\n", []hierarchy{v1}},
		"version 2": {mountOfVersion2, "0::/user.slice/session-1.scope\n", []hierarchy{{at: "/sys/fs/cgroup", own: "/user.slice/session-1.scope", v2: true}}},
		"both": {mountOfVersion2 + mountsOfVersion1, "4:memory:/session/7\n0::/\n",
			[]hierarchy{v1, {at: "/sys/fs/cgroup", own: "/", v2: true}}},
	} {
		if got := parseHierarchies(c.mountinfo, c.self); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}

func TestOnlyKilledForMemoryCounts(t *testing.T) {
	for text, want := range map[string]bool{
		"":                               false,
		"low 0\noom 3\noom_kill 0\n":     false,
		"oom_kill_disable 0\noom_kill 1": true,
	} {
		if got := countsOOMKill(text); got != want {
			t.Errorf("countsOOMKill(%q) = %v", text, got)
		}
	}
}
