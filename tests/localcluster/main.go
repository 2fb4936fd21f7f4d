// Localcluster runs a Kubernetes control plane and nodes on one machine, without Docker, from one binary: etcd, API server,
// controller manager, scheduler and kubelet are the real ones; only the container runtime is our own (package cri), and its
// containers are processes of this machine. It is for tests and demonstrations.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	_ "a.localcluster/box" // acts before main, in the first process of a container
	"a.localcluster/layout"
	"a.localcluster/network"
	"a.localcluster/supervisor"
)

const (
	dirVariable        = "LOCALCLUSTER_DIR"
	defaultDir         = ".build/localcluster"
	kubernetesVariable = "LOCALCLUSTER_KUBERNETES"
)

// tools are the clients that can be pointed to a cluster.
var tools = []string{"kubectl", "helm"}

func main() {
	if name := filepath.Base(os.Args[0]); name == "kubectl" || name == "helm" { // by a link of that name
		runComponent(name, os.Args[1:])
	}
	if len(os.Args) > 1 && !slices.Contains(tools, os.Args[1]) {
		runComponent(os.Args[1], os.Args[2:])
	}
	err := rootCommand().Execute()
	var code exitCode
	switch {
	case errors.As(err, &code):
		os.Exit(int(code))
	case supervisor.WasSaid(err):
		os.Exit(1)
	case err != nil:
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "localcluster:", err)
	os.Exit(1)
}

// exitCode is an error that has been told already.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

func rootCommand() *cobra.Command {
	dir := os.Getenv(dirVariable)
	if dir == "" {
		dir = defaultDir
	}
	root := &cobra.Command{Use: "localcluster", Short: "A real Kubernetes cluster on this machine, for tests and demonstrations",
		TraverseChildren: true, SilenceErrors: true, SilenceUsage: true, CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true}}
	root.PersistentFlags().StringVar(&dir, "dir", dir, "directory of the cluster; also "+dirVariable)
	here := func() (layout.Dir, error) {
		path, err := filepath.Abs(dir)
		return layout.Dir(path), err
	}
	root.AddCommand(upCommand(&dir), downCommand(here), statusCommand(here), kubeconfigCommand(here))
	for _, tool := range tools {
		root.AddCommand(toolCommand(tool, root, here))
	}
	return root
}

type directory func() (layout.Dir, error)

func upCommand(dir *string) *cobra.Command {
	var o supervisor.Options
	var detach bool
	var resources []string
	c := &cobra.Command{Use: "up", Short: "Run a cluster until this process ends, or in the background", Args: cobra.NoArgs}
	f := c.Flags()
	f.BoolVar(&detach, "detach", false, "run it in the background and return when it is ready")
	f.StringVar(&o.Images, "images", "", "file that says what image names stand for (default: every name is this machine's root)")
	f.IntVar(&o.Nodes, "nodes", 1, "number of nodes, each a kubelet with its runtime")
	f.StringVar(&o.Containerd, "containerd", "", "directory of containerd's programs: nodes run it in place of the runtime of our own")
	f.BoolVar(&o.Services, "services", false, "Service addresses and names, by kube-proxy and CoreDNS; with --containerd")
	f.StringVar(&o.Policies, "policies", "", "kube-router's program: NetworkPolicies are enforced, on one node")
	f.StringSliceVar(&o.IPFamilies, "ip-families", []string{network.IPv4.Name}, "of Services, nodes and pods: IPv4, IPv6 or both, the first as the cluster's own")
	f.StringVar(&o.Kubernetes, "kubernetes", os.Getenv(kubernetesVariable), "directory of another release's programs; also "+kubernetesVariable)
	f.StringSliceVar(&resources, "extended-resource", nil, "NAME=NUMBER simulated on each node, as nvidia.com/gpu=8")
	f.IntVar(&o.Devices, "devices", 0, "number of fake DRA devices on each node")
	f.StringVar(&o.Driver, "driver", "gpu.example.com", "name of their DRA driver and DeviceClass")
	f.StringVar(&o.FeatureGates, "feature-gates", "", "of the control plane: GenericWorkload=true,GangScheduling=true")
	f.StringVar(&o.RuntimeConfig, "runtime-config", "", "of the API server: scheduling.k8s.io/v1alpha2=true")
	f.IntVar(&o.Port, "port", 0, "port of the API server on 127.0.0.1 (default: that of last time, or any free one)")
	f.BoolVar(&o.StopOnEOF, "stop-on-eof", false, "end when standard input does: the cluster then ends with whoever holds its other end")
	c.MarkFlagsMutuallyExclusive("detach", "stop-on-eof")
	c.RunE = func(*cobra.Command, []string) error {
		var err error
		if o.ExtendedResources, err = supervisor.ParseExtendedResources(resources); err != nil {
			return err
		}
		o.Dir = layout.Dir(*dir)
		if err := o.Complete(); err != nil {
			return err
		}
		if !detach {
			return supervisor.Up(o)
		}
		rest := slices.DeleteFunc(slices.Clone(os.Args[1:]), func(a string) bool { return a == "--detach" || a == "--detach=true" })
		return supervisor.UpDetached(o, rest)
	}
	return c
}

func downCommand(here directory) *cobra.Command {
	var remove bool
	c := &cobra.Command{Use: "down", Short: "End a cluster; its directory stays and can be started again", Args: cobra.NoArgs}
	c.Flags().BoolVar(&remove, "delete", false, "remove its directory too, with what pods wrote as other users")
	c.RunE = func(*cobra.Command, []string) error {
		dir, err := here()
		if err != nil {
			return err
		}
		if remove {
			return supervisor.Delete(dir)
		}
		return supervisor.Down(dir)
	}
	return c
}

func statusCommand(here directory) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{Use: "status", Short: "Say what runs; exit code 0: ready, 1: not ready, 3: not running", Args: cobra.NoArgs}
	c.Flags().BoolVar(&asJSON, "json", false, "for programs")
	c.RunE = func(*cobra.Command, []string) error {
		dir, err := here()
		if err != nil {
			return err
		}
		status, health := supervisor.Look(dir)
		if asJSON {
			if err := status.JSON(os.Stdout); err != nil {
				return err
			}
		} else {
			status.Print(os.Stdout)
		}
		if health != supervisor.Ready {
			return exitCode(health)
		}
		return nil
	}
	return c
}

func kubeconfigCommand(here directory) *cobra.Command {
	return &cobra.Command{Use: "kubeconfig", Short: "Print the path of the kubeconfig, which is there while the cluster is ready", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			dir, err := here()
			if err != nil {
				return err
			}
			fmt.Println(dir.Kubeconfig())
			if _, err := os.Stat(dir.Kubeconfig()); err != nil {
				return fmt.Errorf("no cluster is ready in %s: localcluster up --detach --dir %s", dir, dir)
			}
			return nil
		}}
}

// toolCommand is kubectl or helm on this cluster; a KUBECONFIG of the caller's counts where no directory was named.
func toolCommand(name string, root *cobra.Command, here directory) *cobra.Command {
	return &cobra.Command{Use: name, Short: name + " with the cluster's kubeconfig", DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			dir, err := here()
			if err != nil {
				return err
			}
			named := root.PersistentFlags().Changed("dir") || os.Getenv(dirVariable) != ""
			if named || os.Getenv("KUBECONFIG") == "" {
				if err := useCluster(dir); err != nil {
					return err
				}
			}
			runComponent(name, args)
			return nil
		}}
}

// useCluster points kubectl and helm to a cluster, and helm's own files into its directory.
func useCluster(dir layout.Dir) error {
	for name, value := range map[string]string{"KUBECONFIG": dir.Kubeconfig(), "HELM_CACHE_HOME": dir.Path("helm", "cache"),
		"HELM_CONFIG_HOME": dir.Path("helm", "config"), "HELM_DATA_HOME": dir.Path("helm", "data")} {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	return nil
}
