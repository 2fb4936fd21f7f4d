package cgroup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNewGroupHasWhatTheOneAboveHas(t *testing.T) {
	above := t.TempDir()
	at := filepath.Join(above, "below")
	for name, text := range map[string]string{"cpuset.cpus": "0-3\n", "cpuset.mems": "\n"} {
		if err := os.WriteFile(filepath.Join(above, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(at, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} { // the kernel makes them with the group
		if err := os.WriteFile(filepath.Join(at, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := handDown(above, at); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"cpuset.cpus": "0-3", "cpuset.mems": ""} {
		got, err := os.ReadFile(filepath.Join(at, name))
		if err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("%s has %q, %v", name, got, err)
		}
	}
}
