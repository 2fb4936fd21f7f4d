package supervisor

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"a.localcluster/layout"
	"a.localcluster/network"
)

// Options of a cluster, as asked for on the command line.
type Options struct {
	Dir        layout.Dir
	Images     string // file of image names, "": every name is this machine's root
	Nodes      int
	Containerd string // directory of containerd's programs, "": nodes run the runtime of our own
	Services   bool   // kube-proxy and CoreDNS
	Policies   string // kube-router's program, "": nobody enforces NetworkPolicies
	IPFamilies []string
	Kubernetes string // directory of another release's programs, "": those of this binary
	// ExtendedResources of each node by name, simulated: nothing but the number is there.
	ExtendedResources map[string]string
	Devices           int    // fake devices of a DRA driver, on each node
	Driver            string // its name, and that of its DeviceClass
	FeatureGates      string // of the control plane, as its programs take them: A=true,B=false
	RuntimeConfig     string // of the API server: GROUP/VERSION=true
	Port              int    // of the API server on the machine's loopback, 0: any free one
	StopOnEOF         bool   // end when standard input does
}

// ParseExtendedResources reads NAME=QUANTITY items.
func ParseExtendedResources(items []string) (map[string]string, error) {
	out := map[string]string{}
	for _, item := range items {
		name, quantity, ok := strings.Cut(item, "=")
		if !ok {
			return nil, fmt.Errorf("extended resource %q is not NAME=NUMBER, as nvidia.com/gpu=8", item)
		}
		if !strings.Contains(name, "/") || len(validation.IsQualifiedName(name)) > 0 {
			return nil, fmt.Errorf("extended resource %q: the name must be DOMAIN/NAME, as nvidia.com/gpu", item)
		}
		q, err := resource.ParseQuantity(quantity)
		if err != nil || q.Sign() < 0 || q.Value()*1000 != q.MilliValue() {
			return nil, fmt.Errorf("extended resource %q: the number must be a whole one, 0 or more", item)
		}
		out[name] = q.String()
	}
	return out, nil
}

// Complete makes paths absolute and refuses what can't work, before anything is started.
func (o *Options) Complete() error {
	dir, err := filepath.Abs(string(o.Dir))
	if err != nil {
		return err
	}
	o.Dir = layout.Dir(dir)
	if o.Images != "" {
		if o.Images, err = filepath.Abs(o.Images); err != nil {
			return err
		}
		if _, err := os.Stat(o.Images); err != nil {
			return fmt.Errorf("image file: %w", err)
		}
	}
	if o.Nodes < 1 || o.Nodes > network.MaxNodes {
		return fmt.Errorf("--nodes %d: a cluster here has 1 to %d nodes", o.Nodes, network.MaxNodes)
	}
	if o.Devices < 0 || o.Port < 0 || o.Port > 65535 {
		return fmt.Errorf("--devices %d --port %d: a negative number, or a port above 65535", o.Devices, o.Port)
	}
	if o.Devices == 0 {
		o.Driver = ""
	}
	if _, err := network.FamiliesOf(o.IPFamilies); err != nil {
		return fmt.Errorf("--ip-families: %w", err)
	}
	if err := o.checkContainerd(); err != nil {
		return err
	}
	if err := o.checkPolicies(); err != nil {
		return err
	}
	if err := o.checkKubernetes(); err != nil {
		return err
	}
	return o.Dir.CheckLength(o.Driver)
}

// families of addresses: Complete has refused others.
func (o *Options) families() []network.Family {
	out, _ := network.FamiliesOf(o.IPFamilies)
	return out
}

// differences says in what a running cluster is not the one asked for.
func (o *Options) differences(running Options) (out []string) {
	add := func(what string, is, asked any) {
		if !reflect.DeepEqual(is, asked) {
			out = append(out, fmt.Sprintf("%s is %v and not %v", what, is, asked))
		}
	}
	add("--images", running.Images, o.Images)
	add("--nodes", running.Nodes, o.Nodes)
	add("--containerd", running.Containerd, o.Containerd)
	add("--services", running.Services, o.Services)
	add("--policies", running.Policies, o.Policies)
	add("--ip-families", running.IPFamilies, o.IPFamilies)
	add("--kubernetes", running.Kubernetes, o.Kubernetes)
	add("--devices", running.Devices, o.Devices)
	add("--driver", running.Driver, o.Driver)
	add("--feature-gates", running.FeatureGates, o.FeatureGates)
	add("--runtime-config", running.RuntimeConfig, o.RuntimeConfig)
	if !maps.Equal(running.ExtendedResources, o.ExtendedResources) {
		add("--extended-resource", running.ExtendedResources, o.ExtendedResources)
	}
	if o.Port != 0 {
		add("--port", running.Port, o.Port)
	}
	return out
}
