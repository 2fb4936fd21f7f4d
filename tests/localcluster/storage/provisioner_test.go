package storage

import (
	"context"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"a.localcluster/layout"
)

func claim(change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	class := DefaultClass
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "n", UID: "1", Annotations: map[string]string{selectedNode: "node1"}},
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &class}}
	change(c)
	return c
}

func TestOnlyClaimsThatWaitForThisProvisionerGetAVolume(t *testing.T) {
	ctx := t.Context()
	client := fake.NewClientset()
	if err := makeClasses(ctx, client); err != nil {
		t.Fatal(err)
	}
	other := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Provisioner: "example.com/other"}
	if _, err := client.StorageV1().StorageClasses().Create(ctx, other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	p := &provisioner{client: client, dir: layout.Dir(t.TempDir()), classes: factory.Storage().V1().StorageClasses().Lister()}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	immediate, others := ImmediateClass, "other"
	for name, c := range map[string]struct {
		change func(*corev1.PersistentVolumeClaim)
		want   bool
	}{
		"a pod was scheduled": {func(*corev1.PersistentVolumeClaim) {}, true},
		"no pod yet":          {func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil }, false},
		"immediate":           {func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil; c.Spec.StorageClassName = &immediate }, true},
		"bound":               {func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "v" }, false},
		"another's":           {func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = &others }, false},
		"no class":            {func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = nil }, false},
		"about to be deleted": {func(c *corev1.PersistentVolumeClaim) { c.DeletionTimestamp = &metav1.Time{} }, false},
	} {
		if got := p.classOf(claim(c.change)) != nil; got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestReclaimingRemovesNothingButTheVolumesOwnDirectory(t *testing.T) {
	dir, elsewhere := layout.Dir(t.TempDir()), t.TempDir()
	c := claim(func(*corev1.PersistentVolumeClaim) {})
	v := volume("pvc-1", elsewhere, c, &storagev1.StorageClass{}) // as somebody may have written it
	client := fake.NewClientset(v)
	if err := (&provisioner{client: client, dir: dir}).reclaim(context.Background(), v); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(elsewhere); err != nil {
		t.Errorf("a directory elsewhere was removed: %v", err)
	}
}
