package box

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestDirectoriesBelowAHiddenOneAreLeftOut(t *testing.T) {
	for _, c := range []struct{ dirs, want []string }{
		{nil, nil},
		{[]string{"/repo/.build/cluster", "/tmp", "/repo"}, []string{"/repo", "/tmp"}},
		{[]string{"/repo-two", "/repo", "/repo/"}, []string{"/repo", "/repo-two"}},
	} {
		if got := outermost(c.dirs); !slices.Equal(got, c.want) {
			t.Errorf("outermost(%q) = %q, want %q", c.dirs, got, c.want)
		}
	}
}

func TestMountsBelowOthersComeAfterThem(t *testing.T) {
	given := []Mount{{Target: "/a/b/c"}, {Target: "/z"}, {Target: "/a/"}, {Target: "/a/b"}}
	var got []string
	for _, m := range shallowFirst(given) {
		got = append(got, m.Target)
	}
	if want := []string{"/z", "/a/", "/a/b", "/a/b/c"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestLinksAreFollowedInsideTheRootOnly(t *testing.T) {
	root := t.TempDir()
	for link, to := range map[string]string{"run-link": "/run", "up": "../../../etc", "a": "b", "b": "a"} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		"/plain/../x":      "/x",
		"/run-link/secret": "/run/secret",
		"/up/passwd":       "/etc/passwd",
		"/not/there":       "/not/there",
	} {
		if got, err := within(root, path); err != nil || got != filepath.Join(root, want) {
			t.Errorf("within(%q) = %q, %v, want %q", path, got, err, want)
		}
	}
	if got, err := within(root, "/a"); err == nil {
		t.Errorf("links in a circle lead to %q", got)
	}
}

func TestCommandIsFoundByTheContainersPath(t *testing.T) {
	dir := t.TempDir()
	program, text := filepath.Join(dir, "program"), filepath.Join(dir, "text")
	for path, mode := range map[string]os.FileMode{program: 0o755, text: 0o644} {
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	env := []string{"PATH=/nowhere:" + dir}
	for name, want := range map[string]string{"program": program, "./x": "./x", "/bin/x": "/bin/x"} {
		if got, err := LookPath(name, env); err != nil || got != want {
			t.Errorf("LookPath(%q) = %q, %v, want %q", name, got, err, want)
		}
	}
	for _, name := range []string{"text", "absent"} {
		if got, err := LookPath(name, env); err == nil {
			t.Errorf("LookPath(%q) = %q", name, got)
		}
	}
}

func TestParentsOfABindOpenUpOnOwnFileSystemsOnly(t *testing.T) {
	root := t.TempDir()
	target := filepath.Join(root, "home/me/venv")
	if err := os.MkdirAll(target, 0o700); err != nil {
		t.Fatal(err)
	}
	mode := func() os.FileMode {
		st, err := os.Stat(filepath.Join(root, "home"))
		if err != nil {
			t.Fatal(err)
		}
		return st.Mode().Perm()
	}
	if err := openParents(root, "/home/me/venv", map[uint64]bool{}); err != nil || mode() != 0o700 {
		t.Fatalf("a directory of another file system has mode %o, %v", mode(), err)
	}
	own, err := deviceNumbers(root, root)
	if err != nil {
		t.Fatal(err)
	}
	if err := openParents(root, "/home/me/venv", own); err != nil || mode() != 0o711 {
		t.Fatalf("a directory of the container's own has mode %o, %v", mode(), err)
	}
}
