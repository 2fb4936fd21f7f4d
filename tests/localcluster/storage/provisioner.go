// Package storage gives claims a directory each, or a file system of their own.
//
// The volumes are of kind "local" rather than "hostPath", as the kubelet applies fsGroup to those. Every node of a cluster is
// this machine, so a volume may be used from each of them, as one on a network would; the size of a directory is not enforced.
package storage

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	storagelisters "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/hanwen/go-fuse/v2/fuse"

	"a.localcluster/layout"
	"a.localcluster/pki"
)

const (
	// Provisioner is its name in a StorageClass.
	Provisioner = "localcluster/directory"
	// DefaultClass binds with the first pod that uses the claim, as the default of most clusters does.
	DefaultClass = "standard"
	// ImmediateClass binds at once.
	ImmediateClass = "immediate"

	provisionedBy = "pv.kubernetes.io/provisioned-by"
	isDefault     = "storageclass.kubernetes.io/is-default-class"
	selectedNode  = "volume.kubernetes.io/selected-node"
)

type provisioner struct {
	client  kubernetes.Interface
	dir     layout.Dir
	claims  corelisters.PersistentVolumeClaimLister
	volumes corelisters.PersistentVolumeLister
	classes storagelisters.StorageClassLister
	mounts  mounts
}

// Main provisions until it is told to end.
func Main(args []string) error {
	flags := flag.NewFlagSet("provisioner", flag.ContinueOnError)
	dir := flags.String("dir", "", "directory of the cluster")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	client, err := pki.Client(layout.Dir(*dir), pki.Admin)
	if err != nil {
		return err
	}
	if err := makeClasses(ctx, client); err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 30*time.Second)
	claims, volumes, classes := factory.Core().V1().PersistentVolumeClaims(), factory.Core().V1().PersistentVolumes(), factory.Storage().V1().StorageClasses()
	changed := make(chan struct{}, 1)
	wake := func() {
		select {
		case changed <- struct{}{}:
		default: // it is awake already
		}
	}
	for _, i := range []cache.SharedIndexInformer{claims.Informer(), volumes.Informer(), classes.Informer()} {
		if _, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(any) { wake() }, UpdateFunc: func(any, any) { wake() }, DeleteFunc: func(any) { wake() }}); err != nil {
			return err
		}
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	p := &provisioner{client: client, dir: layout.Dir(*dir), claims: claims.Lister(), volumes: volumes.Lister(), classes: classes.Lister(), mounts: mounts{map[string]*fuse.Server{}}}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
		if err := p.reconcile(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "the next change, or half a minute, is the next try:", err)
		}
	}
}

func makeClasses(ctx context.Context, client kubernetes.Interface) error {
	reclaim, expands := corev1.PersistentVolumeReclaimDelete, true
	first, atOnce := storagev1.VolumeBindingWaitForFirstConsumer, storagev1.VolumeBindingImmediate
	for _, class := range []*storagev1.StorageClass{
		{ObjectMeta: metav1.ObjectMeta{Name: DefaultClass, Annotations: map[string]string{isDefault: "true"}}, VolumeBindingMode: &first},
		{ObjectMeta: metav1.ObjectMeta{Name: ImmediateClass}, VolumeBindingMode: &atOnce},
		{ObjectMeta: metav1.ObjectMeta{Name: SizedClass}, VolumeBindingMode: &first, AllowVolumeExpansion: &expands, Parameters: map[string]string{medium: mediumFile}},
		{ObjectMeta: metav1.ObjectMeta{Name: NetworkClass}, VolumeBindingMode: &first, Parameters: map[string]string{medium: mediumFUSE}},
	} {
		class.Provisioner, class.ReclaimPolicy = Provisioner, &reclaim
		if _, err := client.StorageV1().StorageClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}

// reconcile looks at all claims and volumes, provisions and reclaims. It returns the first error, after trying all.
func (p *provisioner) reconcile(ctx context.Context) (first error) {
	keep := func(what string, err error) {
		if err != nil && first == nil {
			first = fmt.Errorf("%s: %w", what, err)
		}
	}
	claims, err := p.claims.List(labels.Everything())
	keep("list claims", err)
	for _, c := range claims {
		if class := p.classOf(c); class != nil {
			keep("claim "+c.Namespace+"/"+c.Name, p.provision(ctx, c, class))
		}
	}
	volumes, err := p.volumes.List(labels.Everything())
	keep("list volumes", err)
	for _, v := range volumes {
		switch {
		case isReclaimable(v):
			keep("volume "+v.Name, p.reclaim(ctx, v))
		case v.Annotations[medium] != "" && v.Status.Phase == corev1.VolumeBound && p.isOurs(v):
			keep("volume "+v.Name, p.maintain(ctx, v))
		}
	}
	return first
}

// maintain mounts what is not mounted, as after a restart, and expands what its claim wants larger.
func (p *provisioner) maintain(ctx context.Context, v *corev1.PersistentVolume) error {
	c, err := p.claims.PersistentVolumeClaims(v.Spec.ClaimRef.Namespace).Get(v.Spec.ClaimRef.Name)
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return err
	}
	asked, has := c.Spec.Resources.Requests[corev1.ResourceStorage], v.Spec.Capacity[corev1.ResourceStorage]
	if err := p.mount(v.Spec.Local.Path, v.Annotations[medium], asked.Value()); err != nil {
		return err
	}
	if v.Annotations[medium] == mediumFile && asked.Cmp(has) > 0 {
		v = v.DeepCopy()
		v.Spec.Capacity[corev1.ResourceStorage] = asked
		if _, err := p.client.CoreV1().PersistentVolumes().Update(ctx, v, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	if told := c.Status.Capacity[corev1.ResourceStorage]; v.Annotations[medium] == mediumFile && told.Cmp(asked) < 0 && c.Status.Phase == corev1.ClaimBound {
		c = c.DeepCopy()
		c.Status.Capacity[corev1.ResourceStorage] = asked
		_, err := p.client.CoreV1().PersistentVolumeClaims(c.Namespace).UpdateStatus(ctx, c, metav1.UpdateOptions{})
		return err
	}
	return nil
}

// mount provides what a medium asks for at a path. bytes: of the claim.
func (p *provisioner) mount(path, medium string, bytes int64) error {
	switch medium {
	case mediumFile:
		return p.mounts.file(path, bytes)
	case mediumFUSE:
		return p.mounts.inUserSpace(path)
	case "":
		if err := os.MkdirAll(path, 0o777); err != nil {
			return err
		}
		return os.Chmod(path, 0o777) // past the umask: the pod may run as anyone
	}
	return fmt.Errorf("there is no medium %q: file or fuse", medium)
}

// classOf returns the class of a claim that waits for this provisioner, else nil.
func (p *provisioner) classOf(c *corev1.PersistentVolumeClaim) *storagev1.StorageClass {
	if c.Spec.StorageClassName == nil || c.Spec.VolumeName != "" || c.Status.Phase == corev1.ClaimBound || c.DeletionTimestamp != nil {
		return nil
	}
	class, err := p.classes.Get(*c.Spec.StorageClassName)
	if err != nil || class.Provisioner != Provisioner { // not there yet, or another's
		return nil
	}
	if class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer && c.Annotations[selectedNode] == "" {
		return nil // the scheduler has no pod for it yet
	}
	return class
}

func (p *provisioner) provision(ctx context.Context, c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) error {
	name := "pvc-" + string(c.UID)
	path, asked := p.dir.Path("volumes", name), c.Spec.Resources.Requests[corev1.ResourceStorage]
	if err := p.mount(path, class.Parameters[medium], asked.Value()); err != nil {
		return err
	}
	_, err := p.client.CoreV1().PersistentVolumes().Create(ctx, volume(name, path, c, class), metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil // made a moment ago, and not yet bound
	}
	return err
}

func volume(name, path string, c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) *corev1.PersistentVolume {
	anyNode := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpExists}}}
	v := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{provisionedBy: Provisioner}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:               corev1.ResourceList{corev1.ResourceStorage: c.Spec.Resources.Requests[corev1.ResourceStorage]},
			AccessModes:            c.Spec.AccessModes,
			StorageClassName:       class.Name,
			VolumeMode:             c.Spec.VolumeMode,
			ClaimRef:               &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: c.Namespace, Name: c.Name, UID: c.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: path}},
			NodeAffinity:           &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{anyNode}}},
		},
	}
	if of := class.Parameters[medium]; of != "" {
		v.Annotations[medium] = of
	}
	if class.ReclaimPolicy != nil {
		v.Spec.PersistentVolumeReclaimPolicy = *class.ReclaimPolicy
	}
	return v
}

func isReclaimable(v *corev1.PersistentVolume) bool {
	return v.Annotations[provisionedBy] == Provisioner && v.Spec.Local != nil && v.Status.Phase == corev1.VolumeReleased &&
		v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete && v.DeletionTimestamp == nil
}

// isOurs tells whether a volume lies where this provisioner puts it, whoever wrote the object.
func (p *provisioner) isOurs(v *corev1.PersistentVolume) bool {
	return v.Spec.Local != nil && v.Spec.Local.Path == p.dir.Path("volumes", v.Name)
}

func (p *provisioner) reclaim(ctx context.Context, v *corev1.PersistentVolume) error {
	if p.isOurs(v) {
		if err := p.mounts.remove(v.Spec.Local.Path); err != nil {
			return err
		}
	}
	if err := p.client.CoreV1().PersistentVolumes().Delete(ctx, v.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return nil
}
