package devices

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// keepExtendedResources writes the numbers into each node's status, now and whenever they are not there: the kubelet leaves
// names alone that no device plugin of its own serves, but sets them to 0 when it registers anew.
func keepExtendedResources(ctx context.Context, client kubernetes.Interface, resources map[string]string) error {
	patch, err := statusPatch(resources)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, time.Minute)
	keep := func(object any) {
		node, ok := object.(*corev1.Node)
		if !ok || has(node.Status, resources) {
			return
		}
		if _, err := client.CoreV1().Nodes().Patch(ctx, node.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
			fmt.Fprintf(os.Stderr, "extended resources of %s not written, the next change of the node is the next try: %v\n", node.Name, err)
		}
	}
	if _, err := factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: keep, UpdateFunc: func(_, now any) { keep(now) }}); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	<-ctx.Done()
	factory.Shutdown()
	return nil
}

func statusPatch(resources map[string]string) ([]byte, error) {
	return json.Marshal(map[string]any{"status": map[string]any{"capacity": resources, "allocatable": resources}})
}

func has(status corev1.NodeStatus, resources map[string]string) bool {
	for name, quantity := range resources {
		want := resource.MustParse(quantity) // parsed once already, by the command line
		for _, list := range []corev1.ResourceList{status.Capacity, status.Allocatable} {
			if is, ok := list[corev1.ResourceName(name)]; !ok || is.Cmp(want) != 0 {
				return false
			}
		}
	}
	return true
}
