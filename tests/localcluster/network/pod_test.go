package network

import (
	"errors"
	"net"
	"syscall"
	"testing"
	"time"
)

// soon is less than the neighbour table takes to ask again: it trusts what it knew for 15 s at least.
const soon = 10 * time.Second

var both = []Family{IPv4, IPv6}

func podOf(t *testing.T, id string, number int) *Namespaces {
	t.Helper()
	namespaces, err := Pod{ID: id, Families: both, Hostname: "pod", Node: 1, Number: number}.Make()
	if err != nil {
		t.Fatal(err)
	}
	return namespaces
}

func TestNextPodOfAnAddressIsReachedAtOnce(t *testing.T) {
	if !isolated(t) {
		return
	}
	if err := MakeBridge(both, 1); err != nil {
		t.Fatal(err)
	}
	defer podOf(t, "0000-other-pod", 2).Close() // a bridge without any pod forgets its neighbours
	for _, id := range []string{"0000-first-pod", "0000-next-pod."} {
		namespaces := podOf(t, id, 1)
		for _, f := range both {
			// no one listens there, and the pod says so
			ip := f.PodIP(1, 1)
			if _, err := net.DialTimeout("tcp", net.JoinHostPort(ip, "1"), soon); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%s at %s: %v", id, ip, err)
			}
		}
		RemoveInterface(id)
		namespaces.Close()
	}
}
