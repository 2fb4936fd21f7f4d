package network

import (
	"net"
	"testing"
)

func TestAddressesAreUniqueAndOfThePodNetwork(t *testing.T) {
	_, pods, err := net.ParseCIDR(PodCIDR)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for node := 1; node <= MaxNodes; node++ {
		addresses := []string{NodeIP(node)}
		for n := 1; n <= PodsPerNode; n++ {
			addresses = append(addresses, PodIP(node, n))
		}
		for _, a := range addresses {
			if ip := net.ParseIP(a); ip == nil || !pods.Contains(ip) || seen[a] {
				t.Fatalf("%s of node %d is none, not of the network, or another's", a, node)
			}
			seen[a] = true
		}
	}
}

func TestOnlyAPodsOwnSettingsMayBeSet(t *testing.T) {
	for name, want := range map[string]bool{"net.core.somaxconn": true, "kernel.shmmax": true, "kernel.sem": true, "vm.overcommit_memory": false, "kernel.panic": false} {
		if got := ofPod(name); got != want {
			t.Errorf("ofPod(%q) = %v", name, got)
		}
	}
}
