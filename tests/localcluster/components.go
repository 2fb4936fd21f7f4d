package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
	helm "helm.sh/helm/v4/pkg/cmd"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	kubeproxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	"a.localcluster/cri"
	"a.localcluster/devices"
	"a.localcluster/storage"
	"a.localcluster/supervisor"
)

// kubernetesCommands are the programs of Kubernetes and Helm, unchanged. Each runs as a process of its own, also where one
// could hold several: they share global feature gates and flags.
var kubernetesCommands = map[string]func(args []string) (*cobra.Command, error){
	"kube-apiserver":          func([]string) (*cobra.Command, error) { return apiserver.NewAPIServerCommand(), nil },
	"kube-controller-manager": func([]string) (*cobra.Command, error) { return controllermanager.NewControllerManagerCommand(), nil },
	"kube-scheduler":          func([]string) (*cobra.Command, error) { return scheduler.NewSchedulerCommand(), nil },
	"kubelet":                 func([]string) (*cobra.Command, error) { return kubelet.NewKubeletCommand(context.Background()), nil },
	"kube-proxy":              func([]string) (*cobra.Command, error) { return kubeproxy.NewProxyCommand(), nil },
	"kubectl":                 func([]string) (*cobra.Command, error) { return kubectl.NewDefaultKubectlCommand(), nil },
	"helm": func(args []string) (*cobra.Command, error) {
		return helm.NewRootCmd(os.Stdout, args, helm.SetupLogging)
	},
}

// ownComponents are the rest of a cluster.
var ownComponents = map[string]func(args []string) error{
	"inside":      func(args []string) error { return supervisor.Inside(args[0]) },
	"etcd":        etcd,
	"cri":         cri.Main,
	"provisioner": storage.Main,
	"devices":     devices.Main,
}

// runComponent runs one of them to its end; it returns only for a name that is none.
func runComponent(name string, args []string) {
	if run, ok := ownComponents[name]; ok {
		if err := run(args); err != nil {
			fail(fmt.Errorf("%s: %w", name, err))
		}
		os.Exit(0)
	}
	if make, ok := kubernetesCommands[name]; ok {
		os.Args = append([]string{name}, args...) // kubectl looks for plugins by it
		cmd, err := make(args)
		if err != nil {
			fail(err)
		}
		cmd.SetArgs(args)
		os.Exit(cli.Run(cmd))
	}
}

// etcd DIR CLIENT-URL PEER-URL: one member that does not wait for the disk. A kill of this process loses nothing, as the
// kernel holds what was written; a power cut may.
func etcd(args []string) error {
	client, err := url.Parse(args[1])
	if err != nil {
		return err
	}
	peer, err := url.Parse(args[2])
	if err != nil {
		return err
	}
	cfg := embed.NewConfig()
	cfg.Dir = args[0]
	cfg.UnsafeNoFsync = true
	cfg.LogLevel = "warn"
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{*peer}, []url.URL{*peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer e.Close()
	select {
	case <-ctx.Done():
		return nil
	case err := <-e.Err():
		return err
	}
}
