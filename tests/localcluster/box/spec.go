// Package box is the first process of a container: it builds the root file system, gives up what the pod may not have and
// becomes the container's command.
//
// It owns everything between clone(2) and exec(2) of a container, and asks nobody: what it needs is in its Spec. It runs
// from init(), before main: Go initialises packages in the order of their import paths, the module's name begins with "a",
// and so this runs before the packages of Kubernetes are initialised (2 ms and 10 MB for a container's start, not 90 ms
// and 100 MB). For that it imports nothing but the standard library and golang.org/x/sys.
package box

// What os.Args[0] says when this binary is to be a container's, or a pod's, first process.
const (
	InitArg0  = "container-init"
	PauseArg0 = "pod-pause"
)

// The descriptors that a container's first process starts with, beside its own output.
const (
	specFD  = 3 // the Spec as JSON, read to its end
	errorFD = 4 // what goes wrong leaves here as text; exec closes it, so nothing read means that the command runs
)

// Mount is one bind mount into the container.
type Mount struct {
	Source, Target string
	Readonly       bool
	Propagate      bool // mounts made later on the node appear in the container too (HostToContainer)
}

// Spec is a container, as far as the kernel has to know it.
type Spec struct {
	Args, Env    []string
	Dir          string   // working directory; made if it is not there
	Scratch      string   // an empty directory to build the root on, in this process's own mount namespace
	Root         string   // the image: the lower directory of the overlay
	Hide         []string // directories of the image that the container sees empty
	Binds        []Mount  // the image's: made first, and reachable for every user of the container
	Mounts       []Mount  // the pod's volumes and files
	Devices      []string // device files to show, or directories of them
	Shm          string   // the pod's /dev/shm
	ReadonlyRoot bool
	Privileged   bool
	UID, GID     int
	Groups       []int
	Capabilities uint64 // the bounding set, one bit each
	NoNewPrivs   bool
	Cgroups      []string // cgroup.procs files to join last, so that this process's own memory is not counted
	OOMScoreAdj  int
}
