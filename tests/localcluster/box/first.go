package box

import (
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

func init() {
	switch os.Args[0] {
	case InitArg0:
		err := run() // returns only if it failed
		fmt.Fprint(os.NewFile(errorFD, "errors"), err)
		os.Exit(128)
	case PauseArg0:
		pause()
	}
}

// pause is pid 1 of a pod with a shared process namespace: it reaps orphans until it is killed.
func pause() {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	child := make(chan os.Signal, 1)
	signal.Notify(child, syscall.SIGCHLD)
	for range child {
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

func run() error {
	dieWithRuntime()
	var s Spec
	if err := json.NewDecoder(os.NewFile(specFD, "spec")).Decode(&s); err != nil {
		return fmt.Errorf("read the container's specification: %w", err)
	}
	syscall.CloseOnExec(specFD)
	syscall.CloseOnExec(errorFD)
	syscall.Umask(0o022)
	groups, err := openCgroups(s.Cgroups) // before the root that holds them goes away
	if err != nil {
		return err
	}
	// Lowering it needs a privilege that the cluster of an ordinary user lacks; the container runs all the same.
	_ = os.WriteFile("/proc/self/oom_score_adj", fmt.Appendf(nil, "%d", s.OOMScoreAdj), 0)
	if err := enterRoot(&s); err != nil {
		return err
	}
	if err := os.Chdir(workingDirectory(s.Dir)); err != nil {
		return fmt.Errorf("working directory: %w", err)
	}
	path, err := LookPath(s.Args[0], s.Env)
	if err != nil {
		return err
	}
	for _, fd := range groups {
		if _, err := syscall.Write(fd, []byte("0")); err != nil {
			return fmt.Errorf("join cgroup: %w", err)
		}
	}
	if err := become(&s); err != nil {
		return err
	}
	err = syscall.Exec(path, s.Args, s.Env)
	if err == syscall.EACCES {
		if closed := closedParent(path); closed != "" {
			return fmt.Errorf("exec %s: user %d may not enter %s", path, s.UID, closed)
		}
	}
	return fmt.Errorf("exec %s: %w", path, err)
}

func openCgroups(paths []string) (fds []int, err error) {
	for _, path := range paths {
		fd, err := syscall.Open(path, syscall.O_WRONLY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

func workingDirectory(dir string) string {
	if dir == "" {
		return "/"
	}
	return dir
}

// become gives up capabilities and takes the container's user and groups.
func become(s *Spec) error {
	if err := LimitCapabilities(s.Capabilities, s.NoNewPrivs); err != nil {
		return err
	}
	// In a namespace of one user the kernel refuses to set any group, also the one that there is.
	if err := syscall.Setgroups(s.Groups); err != nil && !(OneUser && len(s.Groups) == 1) {
		return fmt.Errorf("setgroups %v: %w", s.Groups, err)
	}
	if err := syscall.Setresgid(s.GID, s.GID, s.GID); err != nil {
		return fmt.Errorf("setgid %d: %w", s.GID, err)
	}
	if err := syscall.Setresuid(s.UID, s.UID, s.UID); err != nil {
		return fmt.Errorf("setuid %d: %w", s.UID, err)
	}
	dieWithRuntime() // again: setuid cleared it
	return nil
}

// dieWithRuntime is prctl and not Pdeathsig of package syscall: that one kills a child which can't see its parent, as in
// another process namespace.
func dieWithRuntime() { _ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGKILL), 0, 0, 0) }

// LimitCapabilities limits the calling thread, and what it executes, to the capabilities in keep.
func LimitCapabilities(keep uint64, noNewPrivs bool) error {
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		if keep&(1<<c) != 0 {
			continue
		}
		// EINVAL: this kernel does not know the capability
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && err != syscall.EINVAL {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if noNewPrivs {
		return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	}
	return nil
}

// LookPath finds a command by the PATH of env, in the root and working directory of the calling thread.
func LookPath(name string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	path := DefaultPath
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			path = v
		}
	}
	for _, d := range filepath.SplitList(path) {
		f := filepath.Join(d, name)
		if st, err := os.Stat(f); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return f, nil
		}
	}
	return "", fmt.Errorf("exec: %q: executable file not found in $PATH", name)
}

// DefaultPath is a container's PATH where neither image nor pod says another.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// closedParent names the first directory above path, or above what it links to, that the calling user may not enter.
func closedParent(path string) string {
	for hops := 0; hops < 40; hops++ {
		for i := 1; i < len(path); i++ {
			if path[i] == '/' && unix.Access(path[:i], unix.X_OK) != nil {
				return path[:i]
			}
		}
		to, err := os.Readlink(path)
		if err != nil {
			return ""
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(path), to)
		}
		path = filepath.Clean(to)
	}
	return ""
}
