package network

import (
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
)

// Bridge is the interface that pods are connected to, in the namespace that nodes share.
const Bridge = "pods0"

// bridgeAddress is locally administered. A bridge without an address of its own takes the lowest of its interfaces', and so
// another one when that pod ends: pods that know it by the old one reach nothing, the API server included, for a minute.
var bridgeAddress = net.HardwareAddr{0x02, 0, 10, 244, 0, 1}

// MakeBridge gives the calling process's network namespace a loopback and a bridge with one address per node.
func MakeBridge(nodes int) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(APIServer, 32)}); err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = Bridge, bridgeAddress
	br := &netlink.Bridge{LinkAttrs: attrs}
	if err := netlink.LinkAdd(br); err != nil {
		return fmt.Errorf("bridge (is the kernel's bridge module there?): %w", err)
	}
	disableIPv6(Bridge)
	for node := 1; node <= nodes; node++ {
		if err := netlink.AddrAdd(br, &netlink.Addr{IPNet: ipNet(NodeIP(node), 16)}); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(br)
}

// Forward lets the calling process's namespace pass packets on, as a node does for Services.
func Forward() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }

// disableIPv6 spares duplicate-address detection and router solicitation. A kernel without IPv6 has no such file.
func disableIPv6(link string) {
	_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+link+"/disable_ipv6", []byte("1"), 0)
}
