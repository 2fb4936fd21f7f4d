package supervisor

import (
	"fmt"
	"os/exec"
	"path/filepath"
)

// kubernetesPrograms lie in the directory that --kubernetes names.
var kubernetesPrograms = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"}

func (o *Options) checkKubernetes() (err error) {
	if o.Kubernetes == "" {
		return nil
	}
	if o.Kubernetes, err = filepath.Abs(o.Kubernetes); err != nil {
		return err
	}
	for _, each := range kubernetesPrograms {
		if _, err := exec.LookPath(filepath.Join(o.Kubernetes, each)); err != nil {
			return fmt.Errorf("--kubernetes %s: %w (release.sh builds the programs of a release)", o.Kubernetes, err)
		}
	}
	return nil
}

// kubernetes is one of these programs as a component: that of the release that was named, or this binary's own.
func (o *Options) kubernetes(program string, flags []string) *component {
	if o.Kubernetes == "" {
		return &component{name: program, args: append([]string{program}, flags...)}
	}
	return &component{name: program, program: filepath.Join(o.Kubernetes, program), args: flags}
}
