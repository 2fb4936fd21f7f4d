// Package devices simulates GPUs as far as the control plane can see them: numbers of an extended resource on each node,
// and a driver of dynamic resource allocation whose devices are names. Nothing but the allocation is real.
package devices

import (
	"context"
	"errors"
	"flag"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"a.localcluster/layout"
	"a.localcluster/pki"
)

// Main serves every node's devices until it is told to end.
func Main(args []string) error {
	flags := flag.NewFlagSet("devices", flag.ContinueOnError)
	dir := flags.String("dir", "", "directory of the cluster")
	count := flags.Int("nodes", 1, "number of nodes")
	devices := flags.Int("devices", 0, "devices of the DRA driver on each node")
	driver := flags.String("driver", "", "name of the DRA driver")
	resources := map[string]string{}
	flags.Func("extended-resource", "NAME=NUMBER on each node", func(text string) error {
		name, quantity, _ := strings.Cut(text, "=")
		resources[name] = quantity
		return nil
	})
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	client, err := pki.Client(layout.Dir(*dir), pki.Admin)
	if err != nil {
		return err
	}
	nodes := layout.Nodes(layout.Dir(*dir), *count)

	var parts sync.WaitGroup
	failed := make(chan error, 2)
	run := func(part func() error) {
		parts.Go(func() {
			if err := part(); err != nil {
				failed <- err
				cancel() // the other part too: the supervisor starts both again
			}
		})
	}
	if len(resources) > 0 {
		run(func() error { return keepExtendedResources(ctx, client, resources) })
	}
	if *devices > 0 {
		run(func() error { return serveDRA(ctx, client, nodes, *driver, *devices) })
	}
	parts.Wait()
	close(failed)
	err = nil
	for e := range failed {
		err = errors.Join(err, e)
	}
	return err
}
