package supervisor

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"a.localcluster/layout"
	"a.localcluster/network"
	"a.localcluster/pki"
)

// checkPolicies refuses what kube-router can't work with.
func (o *Options) checkPolicies() (err error) {
	if o.Policies == "" {
		return nil
	}
	if o.Policies, err = filepath.Abs(o.Policies); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("--policies: needs root")
	}
	if o.Nodes > 1 {
		return fmt.Errorf("--policies: nodes here share a network, and a kube-router filters the packets of one node: --nodes 1")
	}
	if o.Services {
		return fmt.Errorf("--policies: was not tried with --services")
	}
	if !slices.Equal(o.IPFamilies, []string{network.IPv4.Name}) {
		return fmt.Errorf("--policies: kube-router 2.1.0 makes sets of IPv6 addresses by other names than its rules have: --ip-families IPv4")
	}
	for _, each := range []string{o.Policies, "iptables", "ipset"} {
		if _, err := exec.LookPath(each); err != nil {
			return fmt.Errorf("--policies: needs kube-router, and the programs of Debian's packages iptables and ipset: %w", err)
		}
	}
	return nil
}

// policies is kube-router with its firewall alone. The bridge hands packets from pod to pod to it, as a new network namespace
// has it so (net.bridge.bridge-nf-call-iptables).
func policies(o Options, n layout.Node) *component {
	args := []string{"--run-firewall=true", "--run-router=false", "--run-service-proxy=false", "--enable-cni=false",
		"--kubeconfig=" + pki.Kubeconfig(o.Dir, pki.Admin), "--hostname-override=" + n.Name(), "--health-port=0",
		"--service-cluster-ip-range=" + network.IPv4.ServiceCIDR}
	return &component{name: "kube-router", program: o.Policies, args: args}
}
