package layout

import (
	"strings"
	"testing"
)

func TestDirectoryThatNoSocketFitsInIsRefused(t *testing.T) {
	for _, c := range []struct {
		path, driver string
		ok           bool
	}{
		{"/tmp/cluster", "gpu.example.com", true},
		{"/" + strings.Repeat("x", 84), "", true},
		{"/" + strings.Repeat("x", 85), "", false},
		{"/" + strings.Repeat("x", 84), "gpu.example.com", false},
		{"/tmp/with:colon", "", false},
		{"/tmp/with,comma", "", false},
		{"/tmp/with space", "", false},
	} {
		if err := Dir(c.path).CheckLength(c.driver); (err == nil) != c.ok {
			t.Errorf("%s (%d bytes), driver %q: %v", c.path, len(c.path), c.driver, err)
		}
	}
}
