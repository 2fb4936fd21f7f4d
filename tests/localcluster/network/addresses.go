// Package network gives the cluster its network: a bridge in the supervisor's network namespace, and for each pod a network
// namespace with a loopback of its own and one interface on the bridge. Nothing leads out to the machine's network.
package network

import (
	"fmt"
	"net"
)

const (
	// APIServer is the first of the Service addresses. It lies on the loopback of the supervisor's namespace, so that Service
	// "kubernetes" works without a service proxy.
	APIServer   = "10.96.0.1"
	APIPort     = 443
	ServiceCIDR = "10.96.0.0/16"
	PodCIDR     = "10.244.0.0/16"

	// MaxNodes is bounded by the pod network: a node has 254 addresses of it.
	MaxNodes = 99
)

// APIURL is where everything inside the namespaces finds the API server.
const APIURL = "https://" + APIServer + ":443"

// NodeIP is an address of the bridge: nodes share the supervisor's network namespace, each with an address of its own.
func NodeIP(node int) string { return fmt.Sprintf("10.244.0.%d", node) }

// PodsPerNode addresses, counted from 1, has the range of each node.
const PodsPerNode = 254

func PodIP(node, number int) string { return fmt.Sprintf("10.244.%d.%d", node, number) }

func ipNet(ip string, bits int) *net.IPNet {
	return &net.IPNet{IP: net.ParseIP(ip).To4(), Mask: net.CIDRMask(bits, 32)}
}
