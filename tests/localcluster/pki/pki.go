// Package pki makes a cluster's keys, certificates, tokens and kubeconfigs: random, once per directory, readable by their
// owner alone. A second start of the same directory keeps them, so that ServiceAccount tokens and kubeconfigs stay valid.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"time"

	"a.localcluster/layout"
	"a.localcluster/network"
)

// Identity is who a bearer token stands for. Roles are bound to these users and groups.
type Identity struct {
	Name, User, Group string
}

var (
	Admin             = Identity{"admin", "admin", "system:masters"}
	Scheduler         = Identity{"scheduler", "system:kube-scheduler", ""}
	ControllerManager = Identity{"controller-manager", "system:kube-controller-manager", ""}
)

// Kubelet is the identity of a node, which the Node authorizer limits to what concerns its own pods.
func Kubelet(n layout.Node) Identity {
	return Identity{n.ComponentName("kubelet"), "system:node:" + n.Name(), "system:nodes"}
}

// lifetime of every certificate: a directory that is started again after years is not a case worth rotation.
const lifetimeYears = 10

// Write makes what is not there yet in the directory, and the file of tokens and the kubeconfigs anew each time.
func Write(dir layout.Dir, nodes []layout.Node) error {
	if err := os.MkdirAll(dir.PKI(), 0o700); err != nil {
		return err
	}
	if _, err := os.Stat(dir.Secret("complete")); err != nil {
		if err := writeKeys(dir); err != nil {
			return err
		}
		if err := os.WriteFile(dir.Secret("complete"), nil, 0o600); err != nil { // last: its presence says that all is there
			return err
		}
	}
	identities := []Identity{Admin, Scheduler, ControllerManager}
	for _, n := range nodes {
		identities = append(identities, Kubelet(n))
	}
	var rows []byte
	for _, id := range identities {
		token, err := token(dir, id)
		if err != nil {
			return err
		}
		rows = fmt.Appendf(rows, "%s,%s,%s,%q\n", token, id.User, id.Name, id.Group)
		if err := WriteKubeconfig(dir, id, Kubeconfig(dir, id), network.APIURL); err != nil {
			return err
		}
	}
	return os.WriteFile(dir.Secret("tokens.csv"), rows, 0o600)
}

// Kubeconfig is the file by which an identity reaches the API server inside the cluster's namespaces.
func Kubeconfig(dir layout.Dir, id Identity) string { return dir.Secret(id.Name + ".kubeconfig") }

func token(dir layout.Dir, id Identity) (string, error) {
	path := dir.Secret(id.Name + ".token")
	if text, err := os.ReadFile(path); err == nil {
		return string(text), nil
	} else if !os.IsNotExist(err) {
		return "", err
	}
	secret := make([]byte, 24)
	rand.Read(secret) // never fails
	text := hex.EncodeToString(secret)
	return text, writeWhole(path, []byte(text))
}

// WriteKubeconfig writes path for one of the identities.
func WriteKubeconfig(dir layout.Dir, id Identity, path, server string) error {
	ca, err := os.ReadFile(dir.Secret("ca.crt"))
	if err != nil {
		return err
	}
	token, err := token(dir, id)
	if err != nil {
		return err
	}
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: localcluster, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: %[3]s, user: {token: %[4]s}}]
contexts: [{name: localcluster, context: {cluster: localcluster, user: %[3]s}}]
current-context: localcluster
`, server, base64.StdEncoding.EncodeToString(ca), id.Name, token)
	return writeWhole(path, []byte(text))
}

// writeWhole writes a private file so that nobody sees a part of it.
func writeWhole(path string, text []byte) error {
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func writeKeys(dir layout.Dir) error {
	caKey, err := writeKey(dir, "ca")
	if err != nil {
		return err
	}
	ca := &x509.Certificate{Subject: pkix.Name{CommonName: "localcluster-ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	if err := writeCertificate(dir, "ca", ca, ca, caKey, caKey); err != nil {
		return err
	}
	for name, c := range map[string]*x509.Certificate{
		"apiserver": {Subject: pkix.Name{CommonName: "kube-apiserver"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
			IPAddresses: []net.IP{net.ParseIP("127.0.0.1"), net.ParseIP(network.IPv4.NodeIP(1)), net.ParseIP(network.IPv4.APIServer),
				net.ParseIP(network.IPv6.NodeIP(1)), net.ParseIP(network.IPv6.APIServer)},
			DNSNames: []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}},
		"apiserver-kubelet": {Subject: pkix.Name{CommonName: "kube-apiserver-kubelet-client", Organization: []string{"system:masters"}},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}},
	} {
		key, err := writeKey(dir, name)
		if err != nil {
			return err
		}
		if err := writeCertificate(dir, name, c, ca, key, caKey); err != nil {
			return err
		}
	}
	serviceAccounts, err := writeKey(dir, "sa")
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(&serviceAccounts.PublicKey)
	if err != nil {
		return err
	}
	return writePEM(dir.Secret("sa.pub"), "PUBLIC KEY", der)
}

func writePEM(path, kind string, der []byte) error {
	return writeWhole(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}

func writeKey(dir layout.Dir, name string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, writePEM(dir.Secret(name+".key"), "EC PRIVATE KEY", der)
}

func writeCertificate(dir layout.Dir, name string, c, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) error {
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return err
	}
	c.SerialNumber, c.NotBefore, c.NotAfter = serial, time.Now().Add(-time.Hour), time.Now().AddDate(lifetimeYears, 0, 0)
	c.KeyUsage |= x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		return err
	}
	return writePEM(dir.Secret(name+".crt"), "CERTIFICATE", der)
}
