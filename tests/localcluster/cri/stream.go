package cri

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

// The kubelet asks where to stream (Exec, PortForward), then passes the client's connection to that address, where package
// streaming speaks the protocol and calls streamer.

func (s *server) Exec(_ context.Context, q *v1.ExecRequest) (*v1.ExecResponse, error) {
	return s.streams.GetExec(q)
}

func (s *server) PortForward(_ context.Context, q *v1.PortForwardRequest) (*v1.PortForwardResponse, error) {
	return s.streams.GetPortForward(q)
}

type streamer struct{ s *server }

func (t streamer) Exec(_ context.Context, id string, args []string, in io.Reader, out, errOut io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize) error {
	cmd := &exec.Cmd{WaitDelay: drainLimit}
	if !tty {
		cmd.Stdout, cmd.Stderr = out, errOut
		if in != nil {
			// a pipe of our own: Wait would wait for a client that never closes its input
			read, write, err := os.Pipe()
			if err != nil {
				return err
			}
			defer read.Close()
			cmd.Stdin = read
			go func() {
				_, _ = io.Copy(write, in) // either side may end first
				write.Close()
			}()
		}
	}
	master, err := t.s.startInside(id, args, cmd, tty)
	if err != nil {
		return err
	}
	if master != nil {
		defer master.Close()
		go func() {
			for size := range resize {
				_ = unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Height, Col: size.Width})
			}
		}()
		if in != nil {
			go func() { _, _ = io.Copy(master, in) }() // ends with the master
		}
		_, _ = io.Copy(out, master) // ends with an error when the last process of the terminal does
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return utilexec.CodeExitError{Err: err, Code: int(exitCode(exit.ProcessState))}
	}
	return err
}

func (t streamer) Attach(context.Context, string, io.Reader, io.WriteCloser, io.WriteCloser, bool, <-chan remotecommand.TerminalSize) error {
	return errors.New("attach is not offered here")
}

func (t streamer) PortForward(_ context.Context, id string, port int32, stream io.ReadWriteCloser) error {
	t.s.mu.Lock()
	p := t.s.sandboxes[id]
	if p == nil || p.namespaces == nil {
		t.s.mu.Unlock()
		return status.Error(codes.NotFound, "the pod is not running")
	}
	namespaces := p.namespaces
	t.s.mu.Unlock()
	conn, err := namespaces.Dial(t.s.address(p, t.s.families[0]), port)
	if err != nil {
		return err
	}
	defer conn.Close()
	go func() {
		_, _ = io.Copy(conn, stream) // the client's end is passed on
		_ = conn.(interface{ CloseWrite() error }).CloseWrite()
	}()
	_, err = io.Copy(stream, conn)
	return err
}
