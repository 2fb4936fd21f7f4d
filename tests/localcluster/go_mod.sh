#!/usr/bin/env bash
# Only to move to another Kubernetes release: writes go.mod anew and tidies it. ./go_mod.sh v1.36.3 v3.6.8 v4.2.4
set -euo pipefail
cd "$(dirname "$0")"
kubernetes=${1:?usage: go_mod.sh KUBERNETES ETCD HELM} etcd=${2:?} helm=${3:?}
{
  printf 'module a.localcluster // begins with a: see box/spec.go\n\ngo 1.26.0\n\n'
  printf 'require k8s.io/kubernetes %s\nrequire go.etcd.io/etcd/server/v3 %s\nrequire helm.sh/helm/v4 %s\n' "$kubernetes" "$etcd" "$helm"
  printf 'require github.com/vishvananda/netlink v1.3.1\nrequire github.com/hanwen/go-fuse/v2 v2.12.1\n'
  # k8s.io/kubernetes requires its staging modules at v0.0.0, so each needs a replace line
  for module in api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider cluster-bootstrap \
    code-generator component-base component-helpers controller-manager cri-api cri-client cri-streaming csi-translation-lib \
    dynamic-resource-allocation endpointslice externaljwt kms kube-aggregator kube-controller-manager kube-proxy \
    kube-scheduler kubectl kubelet metrics mount-utils pod-security-admission sample-apiserver sample-cli-plugin \
    sample-controller streaming; do
    echo "replace k8s.io/$module => k8s.io/$module v0.${kubernetes#v1.}"
  done
} >go.mod
go mod tidy
