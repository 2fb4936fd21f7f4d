package supervisor

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"a.localcluster/box"
	"a.localcluster/layout"
	"a.localcluster/pki"
	"a.localcluster/storage"
)

// readyLimit is how long a cluster may take to come up. It takes seconds; the rest is for a machine under load.
const readyLimit = 3 * time.Minute

// bringUp starts the components and returns when a pod could run on each node, with its ServiceAccount, volumes and devices.
func bringUp(ctx context.Context, o Options, nodes []layout.Node, p *processes) error {
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	begin := time.Now()
	progress := func(what string) { fmt.Printf("%4.1f s  %s\n", time.Since(begin).Seconds(), what) }
	dir := o.Dir

	if box.OneUser {
		progress("pods can run as one user only, the one who started this: for more, give it ids in /etc/subuid and /etc/subgid, and install newuidmap")
	}
	if err := writeAuditPolicy(dir); err != nil {
		return err
	}
	p.asked <- &component{name: "etcd", args: []string{"etcd", dir.Path("etcd"), etcdClientURL, etcdPeerURL}}
	p.asked <- o.kubernetes("kube-apiserver", apiServerFlags(o))
	client, err := pki.Client(dir, pki.Admin)
	if err != nil {
		return err
	}
	if err := until(ctx, dir, "API server", func() error {
		_, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	}); err != nil {
		return err
	}
	progress("API server answers")
	if err := forgetNodes(ctx, client, nodes); err != nil {
		return err
	}
	p.asked <- o.kubernetes("kube-controller-manager", controllerManagerFlags(o))
	p.asked <- o.kubernetes("kube-scheduler", schedulerFlags(o))
	p.asked <- &component{name: "provisioner", args: []string{"provisioner", "--dir=" + string(dir)}}
	for _, n := range nodes {
		if err := startNode(ctx, o, n, p); err != nil {
			return err
		}
	}
	if o.Services {
		further, err := services(o, nodes)
		if err != nil {
			return err
		}
		for _, each := range further {
			p.asked <- each
		}
	}
	if o.Devices > 0 || len(o.ExtendedResources) > 0 {
		args := []string{"devices", "--dir=" + string(dir), "--nodes=" + strconv.Itoa(o.Nodes), "--devices=" + strconv.Itoa(o.Devices), "--driver=" + o.Driver}
		for name, quantity := range o.ExtendedResources {
			args = append(args, "--extended-resource="+name+"="+quantity)
		}
		p.asked <- &component{name: "devices", args: args}
	}
	for _, n := range nodes {
		if err := until(ctx, dir, n.Name(), func() error { return nodeReady(ctx, client, n, o) }); err != nil {
			return err
		}
		progress(n.Name() + " is ready")
	}
	if o.Policies != "" { // it ends where it does not find its node
		p.asked <- policies(o, nodes[0])
	}
	return until(ctx, dir, "default ServiceAccount and StorageClass", func() error {
		if _, err := client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{}); err != nil {
			return err
		}
		_, err := client.StorageV1().StorageClasses().Get(ctx, storage.DefaultClass, metav1.GetOptions{})
		return err
	})
}

// until asks again and again; past the deadline it says what was still wrong.
func until(ctx context.Context, dir layout.Dir, what string, ready func() error) error {
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s not ready after %v (%w); see %s", what, readyLimit, err, dir.Path("logs"))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// forgetNodes removes nodes of an earlier run of the directory with more of them; their pods are then moved or ended.
func forgetNodes(ctx context.Context, client kubernetes.Interface, nodes []layout.Node) error {
	known := map[string]bool{}
	for _, n := range nodes {
		known[n.Name()] = true
	}
	all, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, n := range all.Items {
		if known[n.Name] {
			continue
		}
		if err := client.CoreV1().Nodes().Delete(ctx, n.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

func startNode(ctx context.Context, o Options, n layout.Node, p *processes) error {
	if err := os.MkdirAll(n.Runtime(), 0o755); err != nil {
		return err
	}
	if err := os.Remove(n.Socket()); err != nil && !os.IsNotExist(err) { // its presence says that the runtime listens
		return err
	}
	ns, err := makeNodeNamespaces(n, o.Containerd != "")
	if err != nil {
		return err
	}
	runtime := &component{name: n.ComponentName("cri"), node: ns,
		args: []string{"cri", "--dir=" + string(n.Dir), "--node=" + strconv.Itoa(n.Index), "--images=" + o.Images,
			"--ip-families=" + strings.Join(o.IPFamilies, ",")}}
	if o.Containerd != "" {
		if runtime, err = containerd(o, n, ns); err != nil {
			return err
		}
	}
	p.asked <- runtime
	if err := until(ctx, n.Dir, "container runtime of "+n.Name(), func() error { _, err := os.Stat(n.Socket()); return err }); err != nil {
		return err
	}
	if err := os.WriteFile(n.Path("kubelet.yaml"), []byte(kubeletConfig(o, n)), 0o600); err != nil {
		return err
	}
	kubelet := o.kubernetes("kubelet", kubeletFlags(o, n))
	kubelet.name, kubelet.node = n.ComponentName("kubelet"), ns
	p.asked <- kubelet
	return nil
}

// heartbeatAge: after a restart of the directory a node is still "ready" from before, so a fresh heartbeat is asked for.
const heartbeatAge = 20 * time.Second

func nodeReady(ctx context.Context, client kubernetes.Interface, n layout.Node, o Options) error {
	node, err := client.CoreV1().Nodes().Get(ctx, n.Name(), metav1.GetOptions{})
	if err != nil {
		return err
	}
	for name := range o.ExtendedResources {
		if _, ok := node.Status.Allocatable[corev1.ResourceName(name)]; !ok {
			return fmt.Errorf("%s is not allocatable yet", name)
		}
	}
	if len(node.Spec.Taints) > 0 {
		return fmt.Errorf("it has the taint %s", node.Spec.Taints[0].Key)
	}
	for _, c := range node.Status.Conditions {
		if c.Type != corev1.NodeReady {
			continue
		}
		if c.Status != corev1.ConditionTrue {
			return fmt.Errorf("the kubelet says: %s", c.Message)
		}
		if age := time.Since(c.LastHeartbeatTime.Time); age > heartbeatAge {
			return fmt.Errorf("the kubelet's last heartbeat is %v old", age.Round(time.Second))
		}
		return nil
	}
	return fmt.Errorf("the kubelet has not said anything yet (%s)", o.families()[0].NodeIP(n.Index))
}
