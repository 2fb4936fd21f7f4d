// Package network gives the cluster its network: a bridge in the supervisor's network namespace, and for each pod a network
// namespace with a loopback of its own and one interface on the bridge. Nothing leads out to the machine's network.
package network

import (
	"fmt"
	"net"
	"strings"
)

// Family is one kind of addresses, of Services, nodes and pods. A cluster has one, or both; its first counts as its own.
type Family struct {
	Name string // as Services have it in ipFamilies
	// APIServer is the first of the Service addresses. It lies on the loopback of the supervisor's namespace, so that Service
	// "kubernetes" works without a service proxy.
	APIServer   string
	ServiceCIDR string
	PodCIDR     string // that of nodes too

	node, pod string // forms of addresses
}

var (
	IPv4 = Family{Name: "IPv4", APIServer: "10.96.0.1", ServiceCIDR: "10.96.0.0/16", PodCIDR: "10.244.0.0/16",
		node: "10.244.0.%d", pod: "10.244.%d.%d"}
	IPv6 = Family{Name: "IPv6", APIServer: "fd00:10:96::1", ServiceCIDR: "fd00:10:96::/112", PodCIDR: "fd00:10:244::/48",
		node: "fd00:10:244::%x", pod: "fd00:10:244:%x::%x"}
)

const (
	APIPort = 443

	// MaxNodes is bounded by the pod network: a node has 254 addresses of it.
	MaxNodes = 99

	// PodsPerNode addresses, counted from 1, has the range of each node.
	PodsPerNode = 254
)

// APIURL is where everything of a node finds the API server, whatever pods' addresses are.
var APIURL = "https://" + IPv4.APIServer + ":443"

// FamiliesOf reads their names. Raises an error for another name, none, or one twice.
func FamiliesOf(names []string) ([]Family, error) {
	var out []Family
	seen := map[string]bool{}
	for _, name := range names {
		switch {
		case seen[name]:
			return nil, fmt.Errorf("%s is named twice", name)
		case name == IPv4.Name:
			out = append(out, IPv4)
		case name == IPv6.Name:
			out = append(out, IPv6)
		default:
			return nil, fmt.Errorf("%q is neither %s nor %s", name, IPv4.Name, IPv6.Name)
		}
		seen[name] = true
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("none is named: %s, %s or both", IPv4.Name, IPv6.Name)
	}
	return out, nil
}

// NodeIP is an address of the bridge: nodes share the supervisor's network namespace, each with an address of its own.
func (f Family) NodeIP(node int) string { return fmt.Sprintf(f.node, node) }

func (f Family) PodIP(node, number int) string { return fmt.Sprintf(f.pod, node, number) }

// Joined is what each family has, as flags of Kubernetes take it: the cluster's own first.
func Joined(families []Family, of func(Family) string) string {
	var out []string
	for _, f := range families {
		out = append(out, of(f))
	}
	return strings.Join(out, ",")
}

// onBridge is an address with the mask of its network, which all of its addresses are neighbours in.
func (f Family) onBridge(ip string) *net.IPNet {
	_, pods, _ := net.ParseCIDR(f.PodCIDR) // a test reads it
	return &net.IPNet{IP: net.ParseIP(ip), Mask: pods.Mask}
}

// alone is an address without neighbours.
func alone(text string) *net.IPNet {
	ip := net.ParseIP(text)
	if short := ip.To4(); short != nil {
		ip = short
	}
	return &net.IPNet{IP: ip, Mask: net.CIDRMask(8*len(ip), 8*len(ip))}
}
