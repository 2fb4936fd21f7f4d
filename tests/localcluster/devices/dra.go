package devices

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"a.localcluster/layout"
)

// driver is one node's part of a DRA driver. A prepared claim shows in its containers as one environment variable per
// device, by way of a CDI file.
type driver struct {
	name string
	node layout.Node
}

func serveDRA(ctx context.Context, client kubernetes.Interface, nodes []layout.Node, name string, devices int) error {
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf("device.driver == %q", name)}}}}}
	if _, err := client.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	for _, n := range nodes {
		helper, err := startPlugin(ctx, client, &driver{name: name, node: n}, devices)
		if err != nil {
			return fmt.Errorf("DRA driver of %s: %w", n.Name(), err)
		}
		defer helper.Stop()
	}
	<-ctx.Done()
	return nil
}

func startPlugin(ctx context.Context, client kubernetes.Interface, d *driver, devices int) (*kubeletplugin.Helper, error) {
	registrar, data := d.node.Path("kubelet", "plugins_registry"), d.node.Path("kubelet", "plugins", d.name)
	for _, dir := range []string{d.node.CDI(), registrar, data} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return nil, err
		}
	}
	helper, err := kubeletplugin.Start(ctx, d, kubeletplugin.DriverName(d.name), kubeletplugin.NodeName(d.node.Name()), kubeletplugin.KubeClient(client),
		kubeletplugin.RegistrarDirectoryPath(registrar), kubeletplugin.PluginDataDirectoryPath(data))
	if err != nil {
		return nil, err
	}
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: fakeDevices(d.node, devices)}}}
	err = helper.PublishResources(ctx, resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.node.Name(): pool}})
	if err != nil {
		helper.Stop()
		return nil, err
	}
	return helper, nil
}

func fakeDevices(n layout.Node, count int) []resourceapi.Device {
	devices := make([]resourceapi.Device, count)
	for i := range devices {
		index, model, uuid := int64(i), "fake", fmt.Sprintf("fake-%s-%d", n.Name(), i)
		devices[i] = resourceapi.Device{Name: fmt.Sprintf("device-%d", i),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"index": {IntValue: &index}, "model": {StringValue: &model}, "uuid": {StringValue: &uuid}},
			Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}}}
	}
	return devices
}

func (d *driver) file(claim types.UID) string { return d.node.Path("cdi", string(claim)+".json") }

func (d *driver) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	out := map[types.UID]kubeletplugin.PrepareResult{}
	for _, c := range claims {
		spec := cdiSpec{CDIVersion: "0.6.0", Kind: d.name + "/claim"}
		var result kubeletplugin.PrepareResult
		for _, a := range c.Status.Allocation.Devices.Results {
			if a.Driver != d.name || a.Pool != d.node.Name() {
				continue
			}
			id := string(c.UID) + "-" + a.Device
			variable := "FAKE_" + strings.ToUpper(strings.ReplaceAll(a.Device, "-", "_")) + "=" + string(c.UID)
			spec.Devices = append(spec.Devices, cdiDevice{Name: id, Edits: ContainerEdits{Env: []string{variable}}})
			result.Devices = append(result.Devices, kubeletplugin.Device{Requests: []string{a.Request}, PoolName: a.Pool, DeviceName: a.Device,
				CDIDeviceIDs: []string{spec.Kind + "=" + id}})
		}
		text, err := json.Marshal(spec)
		if err == nil {
			err = os.WriteFile(d.file(c.UID), text, 0o600)
		}
		result.Err = err
		out[c.UID] = result
	}
	return out, nil
}

func (d *driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	out := map[types.UID]error{}
	for _, c := range claims {
		out[c.UID] = nil
		if err := os.Remove(d.file(c.UID)); err != nil && !os.IsNotExist(err) {
			out[c.UID] = err
		}
	}
	return out, nil
}

func (d *driver) HandleError(_ context.Context, err error, what string) {
	fmt.Fprintf(os.Stderr, "%s: %s: %v\n", d.node.Name(), what, err)
}
