package pki

import (
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"a.localcluster/layout"
)

// Client returns a client of the API server with an identity, from inside the cluster's namespaces.
func Client(dir layout.Dir, id Identity) (kubernetes.Interface, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", Kubeconfig(dir, id))
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(cfg)
}
