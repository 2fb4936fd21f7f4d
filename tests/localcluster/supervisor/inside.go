package supervisor

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"a.localcluster/layout"
	"a.localcluster/network"
	"a.localcluster/pki"
)

// readyWords begin the line that tells that the cluster is ready; its kubeconfig is there by then.
const readyWords = "ready after "

// The descriptors that pid 1 starts with.
const (
	portFD = 3
	lockFD = 4
)

// Inside is pid 1 of the cluster's namespaces.
func Inside(text string) error {
	begin := time.Now()
	var o Options
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	syscall.CloseOnExec(portFD)
	syscall.CloseOnExec(lockFD)
	port := os.NewFile(portFD, "port")
	listener, err := net.FileListener(port)
	if err != nil {
		return err
	}
	defer listener.Close()
	if err := port.Close(); err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()

	if err := prepareDirectory(o.Dir); err != nil {
		return err
	}
	if err := syscall.Sethostname([]byte("localcluster")); err != nil {
		return refusedNamespaces(err)
	}
	if err := network.MakeBridge(o.families(), o.Nodes); err != nil { // before /proc/sys is read-only
		return refusedNamespaces(err)
	}
	if o.Services {
		if err := network.Forward(); err != nil {
			return err
		}
	}
	if err := closeMachine(o.Dir); err != nil {
		return err
	}
	nodes := layout.Nodes(o.Dir, o.Nodes)
	if err := pki.Write(o.Dir, nodes); err != nil {
		return err
	}
	go forward(listener)

	p := newProcesses(o.Dir, componentEnvironment())
	go func() {
		if err := bringUp(ctx, o, nodes, p); err != nil {
			p.failed <- err
			return
		}
		outside := fmt.Sprintf("https://127.0.0.1:%d", o.Port)
		if err := pki.WriteKubeconfig(o.Dir, pki.Admin, o.Dir.Kubeconfig(), outside); err != nil {
			p.failed <- err
			return
		}
		p.readied <- struct{}{}
		fmt.Printf(readyWords+"%.1f s: export KUBECONFIG=%s\n", time.Since(begin).Seconds(), o.Dir.Kubeconfig())
	}()
	err = p.run(ctx)
	if ctx.Err() != nil {
		err = nil // what fails while everything ends is no failure
	}
	shutDown(p)
	return err
}

// shutDown ends what has something to finish: pods, and the database. The kernel ends whatever is left with this process.
func shutDown(p *processes) {
	p.stop(2*time.Second, syscall.SIGTERM, "kubelet", "provisioner", "devices", "kube-controller-manager", "kube-scheduler")
	p.stop(8*time.Second, syscall.SIGTERM, "cri", "containerd") // gives containers a moment
	p.stop(time.Second, syscall.SIGKILL, "kube-apiserver")      // it would wait for watches to end; what it said is in the database
	p.stop(3*time.Second, syscall.SIGTERM, "etcd")
}

func prepareDirectory(dir layout.Dir) error {
	if err := os.RemoveAll(dir.Path("run")); err != nil { // pids of last time
		return err
	}
	for _, d := range []string{"logs", "run", "volumes", "nodes"} {
		if err := os.MkdirAll(dir.Path(d), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// componentEnvironment is ours without proxies, as nothing is out there, and without another cluster's kubeconfig.
func componentEnvironment() (env []string) {
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		if name != "KUBECONFIG" && !strings.HasSuffix(strings.ToUpper(name), "_PROXY") {
			env = append(env, e)
		}
	}
	return env
}
