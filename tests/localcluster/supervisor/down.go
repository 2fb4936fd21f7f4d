package supervisor

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"a.localcluster/layout"
)

// downLimit is how long an orderly end may take, all its parts together.
const downLimit = 20 * time.Second

// Down ends a cluster and returns when nothing of it is left but its directory.
func Down(dir layout.Dir) error {
	running, err := Running(dir)
	if err != nil {
		return err
	}
	if !running {
		fmt.Printf("not running: %s\n", dir)
		return nil
	}
	state, err := readState(dir)
	if err != nil {
		return fmt.Errorf("a supervisor holds %s, but which is unknown: %w", dir.Lock(), err)
	}
	begin := time.Now()
	for _, attempt := range []struct {
		signal syscall.Signal
		limit  time.Duration
	}{{syscall.SIGTERM, downLimit}, {syscall.SIGKILL, 5 * time.Second}} {
		if err := syscall.Kill(state.PID, attempt.signal); err != nil && err != syscall.ESRCH {
			return fmt.Errorf("end the supervisor, process %d: %w", state.PID, err)
		}
		for end := time.Now().Add(attempt.limit); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if running, err = Running(dir); err != nil {
				return err
			}
			if !running && !alive(state.PID) { // it ends when all is swept up

				fmt.Printf("ended after %.1f s: %s\n", time.Since(begin).Seconds(), dir)
				return nil
			}
		}
	}
	return fmt.Errorf("the supervisor of %s, process %d, does not end", dir, state.PID)
}

// Delete ends a cluster and removes its directory. An ordinary user's pods may have written files as other users of the
// user's own, which only a process with these users can remove.
func Delete(dir layout.Dir) error {
	if err := takeUsers(); err != nil {
		return err
	}
	if _, err := os.Stat(dir.Lock()); err != nil {
		return fmt.Errorf("%s is no cluster's directory, so it is not deleted: %w", dir, err)
	}
	if err := Down(dir); err != nil {
		return err
	}
	return os.RemoveAll(string(dir))
}

// alive says whether a process has not ended yet; one that nobody has waited for has.
func alive(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, ok := strings.Cut(string(text), ") ") // the name before may hold anything
	return ok && !strings.HasPrefix(after, "Z")
}
