// Package layout says where things lie in a cluster's directory and what its nodes are called.
//
// One directory holds one cluster: its keys, data, logs and sockets. Nothing of a cluster lies elsewhere but its control
// groups, which are named after the directory (Tag).
package layout

import (
	"crypto/sha256"
	"fmt"
	"path/filepath"
	"strings"
)

// Self is this program, for whoever starts it again under another name: the file that runs, also when a new one has taken
// its path since.
const Self = "/proc/self/exe"

// Dir is a cluster's directory, an absolute path.
type Dir string

func (d Dir) Path(parts ...string) string {
	return filepath.Join(append([]string{string(d)}, parts...)...)
}

func (d Dir) Lock() string           { return d.Path("lock") }       // held by the supervisor and by its pid 1
func (d Dir) State() string          { return d.Path("state.json") } // of the supervisor that runs, or ran last
func (d Dir) Kubeconfig() string     { return d.Path("kubeconfig") } // is there when the cluster is ready, and only then
func (d Dir) PKI() string            { return d.Path("pki") }        // keys and tokens
func (d Dir) Secret(n string) string { return d.Path("pki", n) }
func (d Dir) Log(n string) string    { return d.Path("logs", n+".log") } // one per component, and the API server's audit log
func (d Dir) PID(n string) string    { return d.Path("run", n+".pid") }  // as the component sees itself, in the cluster's namespace
func (d Dir) Volumes() string        { return d.Path("volumes") }        // one directory per provisioned volume
func (d Dir) Helm() string           { return d.Path("helm") }           // Helm's cache and settings

// Tag names this cluster's things that live outside its directory and its namespaces (control groups).
func (d Dir) Tag() string { return fmt.Sprintf("localcluster-%.4x", sha256.Sum256([]byte(d))) }

// Node is one kubelet with its runtime. Nodes count from 1.
type Node struct {
	Dir   Dir
	Index int
}

func (n Node) Name() string { return fmt.Sprintf("node%d", n.Index) }

func (n Node) Path(parts ...string) string {
	return n.Dir.Path(append([]string{"nodes", n.Name()}, parts...)...)
}

func (n Node) Kubelet() string                       { return n.Path("kubelet") } // its /var/lib/kubelet
func (n Node) Logs() string                          { return n.Path("log") }     // its /var/log, with its containers' logs
func (n Node) Runtime() string                       { return n.Path("runtime") } // records and scratch directories of the runtime
func (n Node) Shims() string                         { return n.Path("shims") }   // its /run/containerd
func (n Node) Socket() string                        { return n.Path("cri.sock") }
func (n Node) CDI() string                           { return n.Path("cdi") } // what prepared device claims mean for a container
func (n Node) ComponentName(component string) string { return component + "-" + n.Name() }

// Nodes lists the nodes of a cluster.
func Nodes(dir Dir, count int) []Node {
	nodes := make([]Node, count)
	for i := range nodes {
		nodes[i] = Node{Dir: dir, Index: i + 1}
	}
	return nodes
}

// CheckLength refuses a directory whose sockets could not be opened, as the kernel takes 107 bytes; driver is that of the
// devices, or "" for none.
func (d Dir) CheckLength(driver string) error {
	last := Node{Dir: d, Index: 99}
	longest := len(last.Socket())
	if driver != "" {
		longest = max(longest, len(last.Path("kubelet", "plugins_registry", driver+"-reg.sock")))
	}
	if over := longest - 107; over > 0 {
		return fmt.Errorf("the path %s is %d bytes too long for the sockets in it: name a shorter directory with --dir", d, over)
	}
	if strings.ContainsAny(string(d), ":,\\ \t\n") {
		return fmt.Errorf("the path %q holds a character that mount options can't: name another directory with --dir", d)
	}
	return nil
}
