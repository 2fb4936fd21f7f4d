package cri

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func newLog(t *testing.T) *logFile {
	t.Helper()
	l := &logFile{path: filepath.Join(t.TempDir(), "0.log"), now: func() time.Time { return time.Unix(0, 0) }}
	if err := l.open(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	return l
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestLogHasOneEntryForEachLine(t *testing.T) {
	l := newLog(t)
	l.copy(strings.NewReader("one\n\nthree, no end"), "stderr")
	const at = "1970-01-01T00:00:00Z stderr F"
	if got, want := read(t, l.path), at+" one\n"+at+" \n"+at+" three, no end\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestLongLineIsLoggedInParts(t *testing.T) {
	l := newLog(t)
	l.copy(strings.NewReader(strings.Repeat("x", linePart+1)+"\n"), "stdout")
	rows := strings.Split(strings.TrimSpace(read(t, l.path)), "\n")
	if len(rows) != 2 || !strings.Contains(rows[0], " P xxx") || !strings.HasSuffix(rows[1], " F x") {
		t.Errorf("got %d entries, the last %q", len(rows), rows[len(rows)-1])
	}
}

func TestReopenedLogGoesOnInTheNewFile(t *testing.T) {
	l := newLog(t)
	l.put("stdout", "F", []byte("before"))
	if err := os.Rename(l.path, l.path+".1"); err != nil {
		t.Fatal(err)
	}
	l.put("stdout", "F", []byte("between"))
	if err := l.open(); err != nil {
		t.Fatal(err)
	}
	l.put("stdout", "F", []byte("after"))
	if old := read(t, l.path+".1"); !strings.Contains(old, "before") || !strings.Contains(old, "between") {
		t.Errorf("the old file has %q", old)
	}
	if now := read(t, l.path); !strings.HasSuffix(now, " after\n") || strings.Contains(now, "before") {
		t.Errorf("the new file has %q", now)
	}
}
