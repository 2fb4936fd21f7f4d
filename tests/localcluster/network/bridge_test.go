package network

import (
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
)

// inside is set for the copy of the test that runs in a network namespace of its own, as a bridge is the machine's otherwise.
const inside = "TEST_IN_A_NETWORK_NAMESPACE"

func TestBridgeKeepsItsAddressWhateverPodsComeAndGo(t *testing.T) {
	if os.Getenv(inside) == "" {
		again := exec.Command(os.Args[0], "-test.run="+t.Name())
		again.Env = append(os.Environ(), inside+"=1")
		self := func(id int) []syscall.SysProcIDMap { return []syscall.SysProcIDMap{{HostID: id, Size: 1}} }
		again.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
			UidMappings: self(os.Getuid()),
			GidMappings: self(os.Getgid()),
		}
		if said, err := again.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		return
	}
	if err := MakeBridge(1); err != nil {
		t.Fatal(err)
	}
	made, err := netlink.LinkByName(bridge)
	if err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = "pod", made.Attrs().Index
	attrs.HardwareAddr = net.HardwareAddr{0, 0, 0, 0, 0, 1} // lower than any
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0"}); err != nil {
		t.Fatal(err)
	}
	now, err := netlink.LinkByName(bridge)
	if err != nil {
		t.Fatal(err)
	}
	if before, after := made.Attrs().HardwareAddr.String(), now.Attrs().HardwareAddr.String(); before != after {
		t.Errorf("the bridge had address %s, and has %s with another pod", before, after)
	}
}
