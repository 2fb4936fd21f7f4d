// Pause holds the namespaces of a pod until it is told to end. Where pods share process ids it is their first process, and Go's
// runtime collects no children: the kernel does, as SIGCHLD is ignored.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signal.Ignore(syscall.SIGCHLD)
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	<-ended
}
