package network

import (
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Bridge is the interface that pods are connected to, in the namespace that nodes share.
const Bridge = "pods0"

// bridgeAddress is locally administered. A bridge without an address of its own takes the lowest of its interfaces', and so
// another one when that pod ends: pods that know it by the old one reach nothing, the API server included, for a minute.
var bridgeAddress = net.HardwareAddr{0x02, 0, 10, 244, 0, 1}

// MakeBridge gives the calling process's network namespace a loopback and a bridge with an address of each family for each node.
// The loopback has the API server's address of IPv4 in any case, for APIURL.
func MakeBridge(families []Family, nodes int) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	ofAPIServer := map[string]bool{IPv4.APIServer: true}
	for _, f := range families {
		ofAPIServer[f.APIServer] = true
	}
	for ip := range ofAPIServer {
		if err := netlink.AddrAdd(lo, address(alone(ip))); err != nil {
			return fmt.Errorf("address %s: %w", ip, err)
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = Bridge, bridgeAddress
	br := &netlink.Bridge{LinkAttrs: attrs}
	if err := netlink.LinkAdd(br); err != nil {
		return fmt.Errorf("bridge (is the kernel's bridge module there?): %w", err)
	}
	withoutAutomaticAddresses(Bridge, families)
	for node := 1; node <= nodes; node++ {
		for _, f := range families {
			if err := netlink.AddrAdd(br, address(f.onBridge(f.NodeIP(node)))); err != nil {
				return fmt.Errorf("address %s: %w", f.NodeIP(node), err)
			}
		}
	}
	return netlink.LinkSetUp(br)
}

// Forward lets the calling process's namespace pass packets on, as a node does for Services.
func Forward() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }

// address counts at once: nobody else has it, and so nobody is asked for it.
func address(of *net.IPNet) *netlink.Addr {
	out := &netlink.Addr{IPNet: of}
	if of.IP.To4() == nil {
		out.Flags = unix.IFA_F_NODAD
	}
	return out
}

// withoutAutomaticAddresses spares duplicate-address detection and router solicitation: an interface has no IPv6 where the
// cluster has none. A kernel without IPv6 has no such files.
func withoutAutomaticAddresses(link string, families []Family) {
	setting := "disable_ipv6"
	value := "1"
	for _, f := range families {
		if f == IPv6 {
			setting, value = "accept_ra", "0"
		}
	}
	_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+link+"/"+setting, []byte(value), 0)
}
