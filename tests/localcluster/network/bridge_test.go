package network

import (
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
)

// inside is set for the copy of a test that runs in namespaces of its own, as a bridge is the machine's otherwise.
const inside = "TEST_IN_NAMESPACES_OF_ITS_OWN"

// isolated says that this is the copy, which is root there. Elsewhere it runs the copy and fails with it.
func isolated(t *testing.T) bool {
	t.Helper()
	if os.Getenv(inside) != "" {
		return true
	}
	again := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	again.Env = append(os.Environ(), inside+"=1")
	self := func(id int) []syscall.SysProcIDMap { return []syscall.SysProcIDMap{{HostID: id, Size: 1}} }
	again.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID,
		UidMappings: self(os.Getuid()),
		GidMappings: self(os.Getgid()),
	}
	if said, err := again.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	return false
}

func TestBridgeKeepsItsAddressWhateverPodsComeAndGo(t *testing.T) {
	if !isolated(t) {
		return
	}
	if err := MakeBridge(both, 1); err != nil {
		t.Fatal(err)
	}
	made, err := netlink.LinkByName(Bridge)
	if err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = "pod", made.Attrs().Index
	attrs.HardwareAddr = net.HardwareAddr{0, 0, 0, 0, 0, 1} // lower than any
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0"}); err != nil {
		t.Fatal(err)
	}
	now, err := netlink.LinkByName(Bridge)
	if err != nil {
		t.Fatal(err)
	}
	if before, after := made.Attrs().HardwareAddr.String(), now.Attrs().HardwareAddr.String(); before != after {
		t.Errorf("the bridge had address %s, and has %s with another pod", before, after)
	}
}
