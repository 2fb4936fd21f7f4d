package network

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Pod says what namespaces a pod gets.
type Pod struct {
	ID, Hostname string
	Families     []Family
	Node, Number int // whose addresses it has, unless it has the node's
	HostNetwork  bool
	HostIPC      bool
	Sysctls      map[string]string
}

// Namespaces of a pod, held open by the runtime: they end with it, and with them the pod's interface. A nil one is the
// node's.
type Namespaces struct {
	Net, IPC, UTS *os.File
	PID           *os.File // only where the pod's containers share one
}

func (n *Namespaces) Close() {
	for _, f := range []*os.File{n.Net, n.IPC, n.UTS, n.PID} {
		if f != nil {
			f.Close()
		}
	}
}

// OnThread runs f on a thread that is thrown away, so that f may change the thread's namespaces and credentials.
func OnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the Go runtime ends the thread
		done <- f()
	}()
	return <-done
}

// Make makes the pod's namespaces. A pod knows the way to other pods and to Service addresses only, so that all else fails
// at once.
func (p Pod) Make() (*Namespaces, error) {
	ns := &Namespaces{}
	if err := OnThread(func() error { return p.make(ns) }); err != nil {
		ns.Close()
		return nil, err
	}
	return ns, nil
}

func (p Pod) make(ns *Namespaces) error {
	node, err := netlink.NewHandle() // a socket of the node's network namespace
	if err != nil {
		return err
	}
	defer node.Close()
	flags := syscall.CLONE_NEWNS
	if !p.HostNetwork {
		flags |= syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS
	}
	if !p.HostIPC {
		flags |= syscall.CLONE_NEWIPC
	}
	if err := unix.Unshare(flags); err != nil {
		return fmt.Errorf("new namespaces: %w", err)
	}
	open := func(kind string) *os.File {
		f, e := os.Open("/proc/thread-self/ns/" + kind)
		err = errors.Join(err, e)
		return f
	}
	if !p.HostNetwork {
		ns.Net, ns.UTS = open("net"), open("uts")
		err = errors.Join(err, syscall.Sethostname([]byte(p.Hostname)))
	}
	if !p.HostIPC {
		ns.IPC = open("ipc")
	}
	if err != nil {
		return err
	}
	// a /proc of this thread's own, as the supervisor's /proc/sys is read-only
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	if !p.HostNetwork {
		// as containerd does: any user may listen on any port of its own pod
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_unprivileged_port_start", []byte("0"), 0); err != nil {
			return err
		}
		if err := p.connect(node, int(ns.Net.Fd())); err != nil {
			return err
		}
	}
	for name, value := range p.Sysctls {
		if !ofPod(name) {
			return fmt.Errorf("sysctl %s is not a pod's own", name)
		}
		if err := os.WriteFile(filepath.Join("/proc/sys", strings.ReplaceAll(name, ".", "/")), []byte(value), 0); err != nil {
			return err
		}
	}
	return nil
}

// ofPod says whether a kernel setting belongs to a pod's namespaces and not to the machine.
func ofPod(sysctl string) bool {
	for _, prefix := range []string{"net.", "kernel.shm", "kernel.msg", "fs.mqueue."} {
		if strings.HasPrefix(sysctl, prefix) {
			return true
		}
	}
	return sysctl == "kernel.sem"
}

// interfaceName is the node's end of a pod's interface.
func interfaceName(podID string) string { return "v" + strings.ReplaceAll(podID, "-", "")[:12] }

// hardwareAddress is locally administered and follows from the pod's address. Who knew the last pod of that address reaches the
// next one at once; by another hardware address it would not for up to a minute, until its neighbour table lets go.
func (p Pod) hardwareAddress() net.HardwareAddr {
	return append(net.HardwareAddr{0x02, 1}, net.ParseIP(IPv4.PodIP(p.Node, p.Number)).To4()...)
}

// connect makes eth0 in the calling thread's new namespace, with its other end on the bridge.
func (p Pod) connect(node *netlink.Handle, netns int) error {
	pod, err := netlink.NewHandle() // of the new namespace
	if err != nil {
		return err
	}
	defer pod.Close()
	lo, err := pod.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := pod.LinkSetUp(lo); err != nil {
		return err
	}
	br, err := node.LinkByName(Bridge)
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = interfaceName(p.ID), br.Attrs().Index
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(netns), PeerHardwareAddr: p.hardwareAddress()}
	if err := node.LinkAdd(veth); err != nil {
		return fmt.Errorf("veth: %w", err)
	}
	outer, err := node.LinkByName(attrs.Name)
	if err != nil {
		return err
	}
	eth0, err := pod.LinkByName("eth0")
	if err != nil {
		return err
	}
	withoutAutomaticAddresses("eth0", p.Families)
	for _, f := range p.Families {
		if err := pod.AddrAdd(eth0, address(f.onBridge(f.PodIP(p.Node, p.Number)))); err != nil {
			return fmt.Errorf("address %s: %w", f.PodIP(p.Node, p.Number), err)
		}
	}
	if err := node.LinkSetUp(outer); err != nil {
		return err
	}
	if err := pod.LinkSetUp(eth0); err != nil {
		return err
	}
	for _, f := range p.Families {
		_, services, err := net.ParseCIDR(f.ServiceCIDR)
		if err != nil {
			return err
		}
		way := &netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: services, Gw: net.ParseIP(f.NodeIP(p.Node))}
		if err := pod.RouteAdd(way); err != nil {
			return fmt.Errorf("the way to %s: %w", services, err)
		}
	}
	return nil
}

// RemoveInterface is for a pod that stops while a process of it still holds the namespace.
func RemoveInterface(podID string) {
	if link, err := netlink.LinkByName(interfaceName(podID)); err == nil {
		_ = netlink.LinkDel(link) // gone in between: as wanted
	}
}

// Dial connects to a port on the pod's own loopback, or else on its address.
func (n *Namespaces) Dial(podIP string, port int32) (conn net.Conn, err error) {
	err = OnThread(func() error {
		if n.Net != nil {
			if err := unix.Setns(int(n.Net.Fd()), syscall.CLONE_NEWNET); err != nil {
				return err
			}
		}
		var last error
		for _, host := range []string{"127.0.0.1", "::1", podIP} {
			if conn, last = net.Dial("tcp", net.JoinHostPort(host, fmt.Sprint(port))); last == nil {
				return nil
			}
		}
		return last
	})
	return conn, err
}
