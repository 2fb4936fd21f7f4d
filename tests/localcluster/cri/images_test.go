package cri

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"a.localcluster/box"
)

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestImageIsFoundWithAndWithoutTag(t *testing.T) {
	file := filepath.Join(t.TempDir(), "images.yaml")
	writeFile(t, file, `images: {agent: {user: "65532"}, "engine:dev": {hide: []}}`)
	f := imageFile(file)
	i, err := f.find("agent:latest") // as Kubernetes asks for it
	if err != nil || i.User != "65532" || i.Root != "/" || !slices.Equal(i.Hide, defaultHide) {
		t.Errorf("agent:latest is %+v, %v", i, err)
	}
	if i, err := f.find("engine:dev"); err != nil || len(i.Hide) != 0 {
		t.Errorf("engine:dev hides %v, %v", i.Hide, err)
	}
	_, err = f.find("engine:other")
	if status.Code(err) != codes.NotFound || !strings.Contains(err.Error(), "images.yaml, which has: agent, engine:dev") {
		t.Errorf("an unknown image: %v", err)
	}
}

func TestAnyNameIsTheMachineWithoutAFile(t *testing.T) {
	if i, err := imageFile("").find("whatever:1"); err != nil || i.Root != "/" {
		t.Errorf("got %+v, %v", i, err)
	}
}

func TestFilesOfAnImageAreAVolumeAndNothingAboveThem(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "images.yaml")
	writeFile(t, file, fmt.Sprintf(`images: {model: {root: %s}, machine: {}}`, root))
	s := &server{images: imageFile(file)}
	for sub, want := range map[string]string{"": root, "small": filepath.Join(root, "small"), "../../etc": filepath.Join(root, "etc")} {
		if got, err := s.files("model", sub); err != nil || got != want {
			t.Errorf("%q: got %s, %v", sub, got, err)
		}
	}
	if got, err := s.files("machine", ""); err == nil {
		t.Errorf("the machine's root: got %s", got)
	}
	if _, err := s.files("other", ""); status.Code(err) != codes.NotFound {
		t.Errorf("an unknown image: %v", err)
	}
}

func TestImageFileWithAnUnknownFieldIsRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "images.yaml")
	writeFile(t, file, `images: {agent: {entry: [x]}}`)
	if i, err := imageFile(file).find("agent"); err == nil || status.Code(err) == codes.NotFound {
		t.Errorf("got %+v, %v", i, err)
	}
}

func TestBindsAreReadOrRefused(t *testing.T) {
	i := image{Binds: []string{"/a:/b", "/c:/d:ro"}}
	got, err := i.mounts()
	if want := []box.Mount{{Source: "/a", Target: "/b"}, {Source: "/c", Target: "/d", Readonly: true}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, bind := range []string{"/a", "a:/b", "/a:b", "/a:/b:rw", "/a:/b:ro:z"} {
		if got, err := (&image{Binds: []string{bind}}).mounts(); err == nil {
			t.Errorf("%q is %+v", bind, got)
		}
	}
}

func TestCommandFollowsImageAndPod(t *testing.T) {
	i := &image{Entrypoint: []string{"entry"}, Cmd: []string{"cmd"}}
	for _, c := range []struct {
		command, args []string
		want          string
	}{
		{nil, nil, "entry cmd"},
		{nil, []string{"args"}, "entry args"},
		{[]string{"command"}, nil, "command"},
		{[]string{"command"}, []string{"args"}, "command args"},
	} {
		if got := strings.Join(command(i, &v1.ContainerConfig{Command: c.command, Args: c.args}), " "); got != c.want {
			t.Errorf("command %q args %q: got %q, want %q", c.command, c.args, got, c.want)
		}
	}
}
