// Asks OpenShift's own admission of security context constraints (SCCs) about pods.
//
// Its argument is the directory of OpenShift's manifests: the SCCs, and the ClusterRoles and bindings by which users may
// use them. On stdin it reads JSON: the namespace, RoleBindings in it, the ServiceAccount that creates the pods, as
// NAMESPACE/NAME, and pods by name. On stdout it writes for each pod what the API server's defaults make of it, and what
// admission makes of that, or its error.
package main

import (
	"context"
	"encoding/json"
	"log"
	"os"
	"path/filepath"
	"strings"

	securityv1 "github.com/openshift/api/security/v1"
	"github.com/openshift/apiserver-library-go/pkg/securitycontextconstraints/sccadmission"
	securityv1listers "github.com/openshift/client-go/security/listers/security/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/pkg/apis/core"
	corev1defaults "k8s.io/kubernetes/pkg/apis/core/v1"
	"k8s.io/kubernetes/pkg/registry/rbac/validation"
	"k8s.io/kubernetes/plugin/pkg/auth/authorizer/rbac"
	"sigs.k8s.io/yaml"
)

type question struct {
	Namespace corev1.Namespace
	Bindings  []*rbacv1.RoleBinding
	Creator   string
	Pods      map[string]*corev1.Pod
}

type answer struct {
	Asked    *corev1.Pod `json:"asked"`
	Admitted *corev1.Pod `json:"admitted,omitempty"`
	Error    string      `json:"error,omitempty"`
}

// shipped is the informer of the SCCs, of which the plugin wants only the lister and whether it is complete.
type shipped struct {
	cache.SharedIndexInformer
	sccs cache.Indexer
}

func (s shipped) Informer() cache.SharedIndexInformer { return s }
func (s shipped) HasSynced() bool                     { return true }
func (s shipped) Lister() securityv1listers.SecurityContextConstraintsLister {
	return securityv1listers.NewSecurityContextConstraintsLister(s.sccs)
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func manifests[T any](pattern string) (found []*T) {
	names, err := filepath.Glob(pattern)
	must(err)
	for _, name := range names {
		content, err := os.ReadFile(name)
		must(err)
		one := new(T)
		must(yaml.UnmarshalStrict(content, one))
		found = append(found, one)
	}
	return found
}

func main() {
	ctx, asked := context.Background(), question{}
	decoder := json.NewDecoder(os.Stdin)
	decoder.DisallowUnknownFields() // a field of a newer Kubernetes would be left out in silence
	must(decoder.Decode(&asked))
	scheme := runtime.NewScheme()
	must(core.AddToScheme(scheme))
	must(corev1defaults.AddToScheme(scheme))

	sccs := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	for _, scc := range manifests[securityv1.SecurityContextConstraints](filepath.Join(os.Args[1], "*_scc-*.yaml")) {
		must(sccs.Add(scc))
	}
	_, roles := validation.NewTestRuleResolver(nil, asked.Bindings,
		manifests[rbacv1.ClusterRole](filepath.Join(os.Args[1], "*_cr-scc-*.yaml")),
		manifests[rbacv1.ClusterRoleBinding](filepath.Join(os.Args[1], "*_crb-*.yaml")))
	cluster := informers.NewSharedInformerFactory(fake.NewClientset(&asked.Namespace), 0)

	plugin := sccadmission.NewConstraint()
	plugin.SetSecurityInformers(shipped{sccs: sccs})
	plugin.SetExternalKubeInformerFactory(cluster)
	plugin.SetAuthorizer(rbac.New(roles, roles, roles, roles))
	must(plugin.ValidateInitialization())
	cluster.Start(ctx.Done())
	cluster.WaitForCacheSync(ctx.Done())

	namespace, name, _ := strings.Cut(asked.Creator, "/")
	creator := serviceaccount.UserInfo(namespace, name, "").(*user.DefaultInfo)
	creator.Groups = append(creator.Groups, user.AllAuthenticated) // as an API server adds it to whoever has a token

	answers := map[string]answer{}
	for name, pod := range asked.Pods {
		if pod.Spec.ServiceAccountName == "" { // what the plugin for ServiceAccounts does before this one
			pod.Spec.ServiceAccountName = "default"
		}
		scheme.Default(pod)
		judged, found := &core.Pod{}, answer{Asked: &corev1.Pod{}, Admitted: &corev1.Pod{}}
		must(scheme.Convert(pod, judged, nil))
		must(scheme.Convert(judged, found.Asked, nil))
		request := admission.NewAttributesRecord(judged, nil, core.Kind("Pod").WithVersion("v1"), asked.Namespace.Name, pod.Name,
			core.Resource("pods").WithVersion("v1"), "", admission.Create, nil, false, creator)
		err := plugin.Admit(ctx, request, nil)
		if err == nil {
			err = plugin.Validate(ctx, request, nil)
		}
		if err == nil {
			must(scheme.Convert(judged, found.Admitted, nil))
		} else {
			found.Admitted, found.Error = nil, err.Error()
		}
		answers[name] = found
	}
	must(json.NewEncoder(os.Stdout).Encode(answers))
}
