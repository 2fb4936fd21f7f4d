package box

import (
	"os"
	"testing"
)

func TestUsersOfANamespaceAreCounted(t *testing.T) {
	for text, want := range map[string][2]bool{
		"         0          0 4294967295\n":                  {false, false}, // the machine's own
		"         0       1000          1\n":                  {true, true},
		"         0       1000          1\n 1 100000 65536\n": {true, false},
		"         0     100000      65536\n":                  {true, false},
	} {
		path := t.TempDir() + "/uid_map"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if inside, one := readUsers(path); [2]bool{inside, one} != want {
			t.Errorf("%q: in a namespace %v, one user %v", text, inside, one)
		}
	}
}
