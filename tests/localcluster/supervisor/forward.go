package supervisor

import (
	"io"
	"net"
	"strconv"

	"a.localcluster/network"
)

// forward carries connections from the port outside to the API server: a socket stays in the network namespace that it was
// opened in, so this process can accept out there and dial in here.
func forward(l net.Listener) {
	for {
		outside, err := l.Accept()
		if err != nil {
			return // closed
		}
		go func() {
			defer outside.Close()
			inside, err := net.Dial("tcp", net.JoinHostPort(network.IPv4.APIServer, strconv.Itoa(network.APIPort)))
			if err != nil {
				return // the API server is not up: the caller sees a closed connection, and tries again
			}
			defer inside.Close()
			join(inside, outside)
		}()
	}
}

// join copies both ways until both ends are closed, passing each half-close on.
func join(a, b net.Conn) {
	done := make(chan struct{}, 2)
	half := func(to, from net.Conn) {
		_, _ = io.Copy(to, from) // an end that broke is an end
		if t, ok := to.(*net.TCPConn); ok {
			_ = t.CloseWrite()
		}
		done <- struct{}{}
	}
	go half(a, b)
	go half(b, a)
	<-done
	<-done
}
