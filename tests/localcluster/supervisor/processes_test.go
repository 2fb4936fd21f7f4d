package supervisor

import (
	"os"
	"testing"
)

func writeText(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestLogThatIsCutGoesOnAtItsNewEnd(t *testing.T) {
	path := t.TempDir() + "/component.log"
	writer, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	for _, text := range []string{"before", "after"} {
		if _, err := writer.WriteString(text); err != nil {
			t.Fatal(err)
		}
		if text == "before" {
			if err := copyAside(path); err != nil {
				t.Fatal(err)
			}
		}
	}
	for file, want := range map[string]string{path: "after", path + ".1": "before"} {
		if got, err := os.ReadFile(file); err != nil || string(got) != want {
			t.Errorf("%s has %q, %v", file, got, err)
		}
	}
}
