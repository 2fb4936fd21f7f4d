package box

import (
	"os"
	"strings"
)

// InUserNamespace says whether user 0 here is somebody else outside; OneUser, whether there is no user but this one. Both are
// settled at the start, as a thread that has entered a container's /proc does not find itself there.
var InUserNamespace, OneUser = readUsers("/proc/self/uid_map")

func readUsers(path string) (inNamespace, one bool) {
	text, err := os.ReadFile(path)
	if err != nil { // a kernel without user namespaces
		return false, false
	}
	f := strings.Fields(string(text)) // of each range: first id inside, first id outside, how many
	return strings.Join(f, " ") != "0 0 4294967295", len(f) == 3 && f[2] == "1"
}
