package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// top is where hierarchies are mounted: that of version 2 itself, or those of version 1 below.
const top = "/sys/fs/cgroup"

// topGroups are those of this machine's hierarchies.
func topGroups() []string {
	if _, err := os.Stat(filepath.Join(top, "cgroup.controllers")); err == nil {
		return []string{top}
	}
	found, _ := filepath.Glob(filepath.Join(top, "*", "cgroup.procs")) // the pattern is well-formed
	for i, each := range found {
		found[i] = filepath.Dir(each)
	}
	return found
}

// KubeletRoot is the group below which a node's kubelet makes those of its pods.
func KubeletRoot(tag, node string) string { return "/" + tag + "/" + node }

// MakeForKubelet makes that group in every hierarchy: a kubelet makes only those below.
func MakeForKubelet(tag, node string) error {
	for _, hierarchy := range topGroups() {
		above := hierarchy
		for _, name := range strings.Split(KubeletRoot(tag, node), "/")[1:] {
			at := filepath.Join(above, name)
			if err := os.MkdirAll(at, 0o755); err != nil {
				return fmt.Errorf("control group of %s: %w", node, err)
			}
			if err := handDown(above, at); err != nil {
				return err
			}
			above = at
		}
	}
	return nil
}

// handDown gives a new group what the one above has: controllers in version 2; in version 1 the CPUs and memory nodes,
// without which a group takes no process.
func handDown(above, at string) error {
	if controllers, err := os.ReadFile(filepath.Join(above, "cgroup.controllers")); err == nil {
		for _, each := range strings.Fields(string(controllers)) {
			_ = os.WriteFile(filepath.Join(above, "cgroup.subtree_control"), []byte("+"+each), 0) // the kubelet names what it lacks
		}
	}
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		text, err := os.ReadFile(filepath.Join(above, name))
		if err != nil || len(strings.TrimSpace(string(text))) == 0 {
			continue // of another controller, or of version 2, where empty is: all that the group above has
		}
		if err := os.WriteFile(filepath.Join(at, name), text, 0); err != nil {
			return fmt.Errorf("hand %s down to %s: %w", name, at, err)
		}
	}
	return nil
}

// RemoveCluster removes all groups of a cluster, once no process is left in them.
func RemoveCluster(tag string) error {
	err := Find(tag).RemoveAll()
	for _, hierarchy := range topGroups() {
		err = errors.Join(err, removeTree(filepath.Join(hierarchy, tag)))
	}
	return err
}
