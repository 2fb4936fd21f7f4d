// Package cgroup limits containers' memory, and ends what is left of one, by the machine's control groups, version 1 or 2.
//
// A group outlives its processes, and is the only thing of a cluster that does: so every group of a cluster lies below one
// named after its directory, and RemoveAll removes them. Where the machine allows no group, limits are ignored (Limits
// says so).
package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long the kernel may take for what it does at once, on a machine that has other things to do.
const patience = 10 * time.Second

// Groups are directories for memory limits and, where there is a version 2 hierarchy, one to kill by. Either may be "".
type Groups struct {
	memory, kill string
	v2           bool // memory is of version 2
}

// hierarchy is a mounted one that may serve: version 2, or version 1 with the memory controller.
type hierarchy struct {
	at  string // where it is mounted
	own string // the calling process's group in it
	v2  bool
}

// parseHierarchies reads /proc/self/mountinfo and /proc/self/cgroup, memory of version 1 first: a controller is in one only.
func parseHierarchies(mountinfo, self string) (out []hierarchy) {
	own := func(controller string) string {
		for _, line := range strings.Split(self, "\n") {
			if f := strings.SplitN(line, ":", 3); len(f) == 3 && (f[1] == controller || controller != "" && strings.Contains(","+f[1]+",", ","+controller+",")) {
				return f[2]
			}
		}
		return "/"
	}
	var second []hierarchy
	for _, line := range strings.Split(mountinfo, "\n") {
		left, right, ok := strings.Cut(line, " - ")
		f, g := strings.Fields(left), strings.Fields(right)
		if !ok || len(f) < 5 || len(g) < 3 {
			continue
		}
		switch {
		case g[0] == "cgroup" && strings.Contains(","+g[2]+",", ",memory,"):
			out = append(out, hierarchy{at: f[4], own: own("memory")})
		case g[0] == "cgroup2":
			second = append(second, hierarchy{at: f[4], own: own(""), v2: true})
		}
	}
	return append(out, second...)
}

// Find makes the directory tag where this process may: below its own group, so that limits on that one hold, or else at the
// top of the hierarchy.
func Find(tag string) *Groups {
	mountinfo, _ := os.ReadFile("/proc/self/mountinfo") // without /proc there are no groups to find either
	self, _ := os.ReadFile("/proc/self/cgroup")
	g := &Groups{}
	for _, h := range parseHierarchies(string(mountinfo), string(self)) {
		for _, base := range []string{filepath.Join(h.at, h.own), h.at} {
			if !h.v2 && g.memory == "" {
				g.memory = make1(filepath.Join(base, tag))
			}
			if h.v2 && g.take2(base, filepath.Join(base, tag)) {
				break
			}
		}
	}
	return g
}

func make1(dir string) string {
	if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
		return ""
	}
	if syscall.Access(dir, 2) != nil {
		return ""
	}
	return dir
}

// take2 tries a place of version 2 and says whether limits are possible there. A group that holds processes can't pass
// controllers on to groups below, but the root of the hierarchy can.
func (g *Groups) take2(base, dir string) bool {
	if make1(dir) == "" {
		return false
	}
	for _, d := range []string{base, dir} { // refused where controllers can't be passed on, which is read below
		_ = os.WriteFile(filepath.Join(d, "cgroup.subtree_control"), []byte("+memory"), 0)
	}
	on, _ := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	limits := g.memory == "" && strings.Contains(string(on), "memory")
	switch {
	case limits:
		if g.kill != "" && g.kill != dir {
			_ = syscall.Rmdir(g.kill)
		}
		g.memory, g.kill, g.v2 = dir, dir, true
	case g.kill == "":
		g.kill = dir
	case g.kill != dir:
		_ = syscall.Rmdir(dir)
	}
	return limits
}

// Limits says whether memory can be limited here.
func (g *Groups) Limits() bool { return g.memory != "" }

// Below are the groups of one node.
func (g *Groups) Below(name string) *Groups {
	below := &Groups{v2: g.v2}
	for _, d := range []struct{ from, to *string }{{&g.memory, &below.memory}, {&g.kill, &below.kill}} {
		if *d.from != "" {
			*d.to = make1(filepath.Join(*d.from, name))
		}
	}
	if below.v2 {
		_ = os.WriteFile(filepath.Join(below.memory, "cgroup.subtree_control"), []byte("+memory"), 0) // Create fails if this did
	}
	return below
}

func (g *Groups) dirs() (out []string) {
	for _, d := range []string{g.memory, g.kill} {
		if d != "" && (len(out) == 0 || d != g.memory) {
			out = append(out, d)
		}
	}
	return out
}

func (g *Groups) dirsOf(id string) (out []string) {
	for _, d := range g.dirs() {
		out = append(out, filepath.Join(d, id))
	}
	return out
}

// Create makes a container's groups and returns the files to join by. A limit of 0 is none.
func (g *Groups) Create(id string, limit int64) (join []string, err error) {
	for _, d := range g.dirsOf(id) {
		if err := os.Mkdir(d, 0o755); err != nil && !os.IsExist(err) {
			return nil, err
		}
		join = append(join, filepath.Join(d, "cgroup.procs"))
	}
	if limit <= 0 || g.memory == "" {
		return join, nil
	}
	dir, bytes := filepath.Join(g.memory, id), strconv.FormatInt(limit, 10)
	if !g.v2 {
		err = os.WriteFile(filepath.Join(dir, "memory.limit_in_bytes"), []byte(bytes), 0)
		_ = os.WriteFile(filepath.Join(dir, "memory.memsw.limit_in_bytes"), []byte(bytes), 0) // absent without swap accounting
		return join, errors.Join(err, g.killTogether(id))
	}
	err = errors.Join(os.WriteFile(filepath.Join(dir, "memory.max"), []byte(bytes), 0),
		os.WriteFile(filepath.Join(dir, "memory.oom.group"), []byte("1"), 0)) // as Kubernetes does on version 2
	_ = os.WriteFile(filepath.Join(dir, "memory.swap.max"), []byte("0"), 0) // absent without swap accounting
	return join, err
}

// killTogether kills all of a container of which the kernel has killed one process for memory, for as long as its group is
// there: version 1 has no memory.oom.group.
func (g *Groups) killTogether(id string) error {
	dir := filepath.Join(g.memory, id)
	control, err := os.Open(filepath.Join(dir, "memory.oom_control"))
	if err != nil {
		return err
	}
	defer control.Close()
	descriptor, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return err
	}
	news := os.NewFile(uintptr(descriptor), "news of "+dir)
	asked := fmt.Sprintf("%d %d", descriptor, control.Fd())
	if err := os.WriteFile(filepath.Join(dir, "cgroup.event_control"), []byte(asked), 0); err != nil {
		return errors.Join(err, news.Close())
	}
	go func() {
		defer news.Close()
		for count := make([]byte, 8); ; {
			if _, err := news.Read(count); err != nil {
				return
			}
			if _, err := os.Stat(dir); err != nil {
				return // the removal of a group is news too
			}
			// the news is that memory is out, which comes before anything is killed for it
			for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
				if g.OOMKilled(id) {
					g.Kill(id)
					break
				}
			}
		}
	}()
	return nil
}

// Join moves a process that was started in a running container to the container's groups.
func (g *Groups) Join(id string, pid int) error {
	var err error
	for _, d := range g.dirsOf(id) {
		e := os.WriteFile(filepath.Join(d, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		if !errors.Is(e, syscall.ESRCH) { // already ended
			err = errors.Join(err, e)
		}
	}
	return err
}

// OOMKilled says whether the kernel killed a process of the container for memory.
func (g *Groups) OOMKilled(id string) bool {
	if g.memory == "" {
		return false
	}
	file := "memory.oom_control"
	if g.v2 {
		file = "memory.events"
	}
	text, _ := os.ReadFile(filepath.Join(g.memory, id, file))
	return countsOOMKill(string(text))
}

func countsOOMKill(text string) bool {
	for _, line := range strings.Split(text, "\n") {
		if n, ok := strings.CutPrefix(line, "oom_kill "); ok && n != "0" {
			return true
		}
	}
	return false
}

// Kill kills what is left of a container, and returns when its groups are empty or after two seconds.
func (g *Groups) Kill(id string) {
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		left := false
		for _, d := range g.dirsOf(id) {
			_ = os.WriteFile(filepath.Join(d, "cgroup.kill"), []byte("1"), 0) // version 2 only; the loop below is for both
			procs, _ := os.ReadFile(filepath.Join(d, "cgroup.procs"))
			for _, p := range strings.Fields(string(procs)) {
				left = true
				if pid, err := strconv.Atoi(p); err == nil && pid > 0 { // 0: of another process namespace
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		}
		if !left {
			return
		}
	}
}

// Remove removes a container's groups.
func (g *Groups) Remove(id string) {
	for _, d := range g.dirsOf(id) {
		remove(d)
	}
}

// RemoveAll removes the groups with all below them, once no process is left in them.
func (g *Groups) RemoveAll() error {
	var err error
	for _, d := range g.dirs() {
		err = errors.Join(err, removeTree(d))
	}
	return err
}

func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if os.IsNotExist(err) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, removeTree(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(err, remove(dir))
}

func remove(dir string) error {
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if err = syscall.Rmdir(dir); err == nil || err == syscall.ENOENT {
			return nil
		}
		// EBUSY: a dying process holds its group for a moment
	}
	return fmt.Errorf("remove control group %s: %w", dir, err)
}
