package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"a.localcluster/layout"
	"a.localcluster/network"
	"a.localcluster/pki"
)

// kubeProxyConfig: nodes share one network namespace, so one proxy is that of all. A pod answers another of its bridge directly,
// so what went through a Service has to come from the node (masqueradeAll) for the answer to find its way back.
const kubeProxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
hostnameOverride: node1
clientConnection: {kubeconfig: %s}
clusterCIDR: %s
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
nftables: {masqueradeAll: true}
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
`

// corefile answers at each node's address, where its pods ask. Names outside of the cluster are refused: nothing is out there.
const corefile = `cluster.local in-addr.arpa {
    bind %s
    errors
    kubernetes cluster.local in-addr.arpa {
        kubeconfig %s
        pods verified
    }
}
`

// services returns what Service addresses and names need besides the control plane.
func services(o Options, nodes []layout.Node) ([]*component, error) {
	addresses := make([]string, len(nodes))
	for i, n := range nodes {
		addresses[i] = network.IPv4.NodeIP(n.Index)
	}
	kubeconfig := pki.Kubeconfig(o.Dir, pki.Admin)
	proxy, dns := o.Dir.Path("kube-proxy.yaml"), o.Dir.Path("Corefile")
	for path, text := range map[string]string{
		proxy: fmt.Sprintf(kubeProxyConfig, kubeconfig, network.IPv4.PodCIDR),
		dns:   fmt.Sprintf(corefile, strings.Join(addresses, " "), kubeconfig),
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	return []*component{
		o.kubernetes("kube-proxy", []string{"--config=" + proxy}),
		{name: "coredns", program: filepath.Join(o.Containerd, "coredns"), args: []string{"-conf=" + dns}},
	}, nil
}
