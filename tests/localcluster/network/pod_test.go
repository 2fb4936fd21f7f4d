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

func podOf(t *testing.T, id, ip string) *Namespaces {
	t.Helper()
	namespaces, err := Pod{ID: id, IP: ip, Hostname: "pod", Node: 1}.Make()
	if err != nil {
		t.Fatal(err)
	}
	return namespaces
}

func TestNextPodOfAnAddressIsReachedAtOnce(t *testing.T) {
	if !isolated(t) {
		return
	}
	if err := MakeBridge(1); err != nil {
		t.Fatal(err)
	}
	defer podOf(t, "0000-other-pod", PodIP(1, 2)).Close() // a bridge without any pod forgets its neighbours
	for _, id := range []string{"0000-first-pod", "0000-next-pod."} {
		ip := PodIP(1, 1)
		namespaces := podOf(t, id, ip)
		// no one listens there, and the pod says so
		if _, err := net.DialTimeout("tcp", net.JoinHostPort(ip, "1"), soon); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: %v", id, err)
		}
		RemoveInterface(id)
		namespaces.Close()
	}
}
