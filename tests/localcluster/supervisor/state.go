package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"a.localcluster/layout"
)

// State is what a supervisor tells others about itself, in the directory. It is to be believed only while the lock is held.
type State struct {
	Options Options // with the port in use
	PID     int     // of the supervisor
	Inner   int     // of pid 1 of the cluster's namespaces, seen from outside
	Started time.Time
}

func (s State) write() error {
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	path := s.Options.Dir.State()
	if err := os.WriteFile(path+".new", append(text, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func readState(dir layout.Dir) (State, error) {
	var s State
	text, err := os.ReadFile(dir.State())
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return s, fmt.Errorf("%s: %w", dir.State(), err)
	}
	return s, nil
}

// lock is of the open file description: the supervisor and its pid 1 hold it together, until the last of both is gone.
// Unlike flock(2) it can be asked about without being taken.
func lock(f *os.File) error {
	return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
}

func isLocked(err error) bool { return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) }

// Running says whether a supervisor has the directory.
func Running(dir layout.Dir) (bool, error) {
	f, err := os.Open(dir.Lock())
	if os.IsNotExist(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	probe := unix.Flock_t{Type: unix.F_RDLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &probe); err != nil {
		return false, fmt.Errorf("ask who holds %s: %w", dir.Lock(), err)
	}
	return probe.Type != unix.F_UNLCK, nil
}
