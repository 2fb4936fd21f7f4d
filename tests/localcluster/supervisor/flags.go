package supervisor

import (
	"fmt"
	"os"
	"strconv"

	"a.localcluster/cgroup"
	"a.localcluster/layout"
	"a.localcluster/network"
	"a.localcluster/pki"
)

const (
	etcdClientURL = "http://127.0.0.1:2379"
	etcdPeerURL   = "http://127.0.0.1:2380"
)

// withGates adds what was asked for on the command line: nothing where that is empty.
func withGates(o Options, flags ...string) []string {
	if o.FeatureGates != "" {
		flags = append(flags, "--feature-gates="+o.FeatureGates)
	}
	return flags
}

func apiServerFlags(o Options) []string {
	dir, families := o.Dir, o.families()
	flags := []string{
		"--etcd-servers=" + etcdClientURL,
		"--bind-address=::", // of IPv4 too
		"--secure-port=" + strconv.Itoa(network.APIPort),
		"--advertise-address=" + families[0].NodeIP(1),
		"--service-cluster-ip-range=" + network.Joined(families, func(f network.Family) string { return f.ServiceCIDR }),
		"--cert-dir=" + dir.PKI(),
		"--tls-cert-file=" + dir.Secret("apiserver.crt"),
		"--tls-private-key-file=" + dir.Secret("apiserver.key"),
		"--client-ca-file=" + dir.Secret("ca.crt"),
		"--token-auth-file=" + dir.Secret("tokens.csv"),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + dir.Secret("sa.pub"),
		"--service-account-signing-key-file=" + dir.Secret("sa.key"),
		"--kubelet-preferred-address-types=InternalIP",
		"--kubelet-client-certificate=" + dir.Secret("apiserver-kubelet.crt"),
		"--kubelet-client-key=" + dir.Secret("apiserver-kubelet.key"),
		"--audit-policy-file=" + dir.Path("audit-policy.yaml"),
		"--audit-log-path=" + dir.Log("audit"),
		"--audit-log-maxsize=32", // MB, of each file
		"--audit-log-maxbackup=2",
	}
	if o.RuntimeConfig != "" {
		flags = append(flags, "--runtime-config="+o.RuntimeConfig)
	}
	return withGates(o, flags...)
}

// auditPolicy: who did what to which object and when, of every request but questions about health.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, nonResourceURLs: [/readyz*, /livez*, /healthz*]}
- {level: Metadata}
`

func writeAuditPolicy(dir layout.Dir) error {
	return os.WriteFile(dir.Path("audit-policy.yaml"), []byte(auditPolicy), 0o600)
}

func controllerManagerFlags(o Options) []string {
	dir := o.Dir
	kubeconfig := pki.Kubeconfig(dir, pki.ControllerManager)
	return withGates(o, []string{
		"--kubeconfig=" + kubeconfig,
		"--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		"--use-service-account-credentials=true",
		"--service-account-private-key-file=" + dir.Secret("sa.key"),
		"--root-ca-file=" + dir.Secret("ca.crt"),
		"--leader-elect=false",
		"--secure-port=0",
		"--kube-api-qps=500",
		"--kube-api-burst=1000",
	}...)
}

func schedulerFlags(o Options) []string {
	return withGates(o, "--kubeconfig="+pki.Kubeconfig(o.Dir, pki.Scheduler), "--leader-elect=false", "--secure-port=0")
}

func kubeletFlags(o Options, n layout.Node) []string {
	return []string{
		"--config=" + n.Path("kubelet.yaml"),
		"--kubeconfig=" + pki.Kubeconfig(n.Dir, pki.Kubelet(n)),
		"--root-dir=" + kubeletRoot,
		"--cert-dir=" + kubeletRoot + "/pki",
		"--hostname-override=" + n.Name(),
		"--node-ip=" + network.Joined(o.families(), func(f network.Family) string { return f.NodeIP(n.Index) }),
		"--v=2",
	}
}

// kubeletConfig: limits are the part of our own runtime, so no groups of the kubelet's own with that; and no eviction for the
// node's sake, as the disk is the machine's. The DNS address is the node's. Without CoreDNS nothing answers there: names fail at
// once, and pods get no event about it.
func kubeletConfig(o Options, n layout.Node) string {
	groups, containerd := "", o.Containerd != ""
	if containerd {
		groups = cgroup.KubeletRoot(n.Dir.Tag(), n.Name())
	}
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
featureGates: {KubeletInUserNamespace: %[1]t} # tolerates that /dev/kmsg is closed
address: "%[2]s"
healthzPort: 0
readOnlyPort: 0
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %[3]s}}
authorization: {mode: Webhook}
containerRuntimeEndpoint: unix://%[4]s
volumePluginDir: %[5]s
containerLogMaxSize: 10Mi
containerLogMaxFiles: 3
containerLogMonitorInterval: 3s
cgroupDriver: cgroupfs
cgroupsPerQOS: %[6]t
cgroupRoot: "%[7]s"
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
localStorageCapacityIsolation: %[6]t
evictionHard: {imagefs.available: "0%%", nodefs.available: "0%%", memory.available: "0%%", nodefs.inodesFree: "0%%"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
clusterDomain: cluster.local
clusterDNS: ["%[2]s"]
resolvConf: ""
serializeImagePulls: false
nodeStatusUpdateFrequency: 2s
`, inUserNamespace, o.families()[0].NodeIP(n.Index), n.Dir.Secret("ca.crt"), n.Socket(), n.Path("volume-plugins"), containerd, groups)
}
