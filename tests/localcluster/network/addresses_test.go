package network

import (
	"net"
	"testing"
)

func TestAddressesAreUniqueAndOfThePodNetwork(t *testing.T) {
	for _, f := range both {
		_, pods, err := net.ParseCIDR(f.PodCIDR)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for node := 1; node <= MaxNodes; node++ {
			addresses := []string{f.NodeIP(node)}
			for n := 1; n <= PodsPerNode; n++ {
				addresses = append(addresses, f.PodIP(node, n))
			}
			for _, a := range addresses {
				if ip := net.ParseIP(a); ip == nil || !pods.Contains(ip) || seen[a] {
					t.Fatalf("%s of node %d is none, not of the network, or another's", a, node)
				}
				seen[a] = true
			}
		}
	}
}

func TestFamiliesAreNamedOnceEach(t *testing.T) {
	for _, names := range [][]string{{}, {"IPv5"}, {"ipv4"}, {"IPv4", "IPv4"}} {
		if found, err := FamiliesOf(names); err == nil {
			t.Errorf("%v is %v", names, found)
		}
	}
	found, err := FamiliesOf([]string{"IPv6", "IPv4"})
	if err != nil || len(found) != 2 || found[0] != IPv6 || found[1] != IPv4 {
		t.Errorf("%v, %v", found, err)
	}
}

func TestOnlyAPodsOwnSettingsMayBeSet(t *testing.T) {
	for name, want := range map[string]bool{"net.core.somaxconn": true, "kernel.shmmax": true, "kernel.sem": true, "vm.overcommit_memory": false, "kernel.panic": false} {
		if got := ofPod(name); got != want {
			t.Errorf("ofPod(%q) = %v", name, got)
		}
	}
}
