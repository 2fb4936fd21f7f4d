package pki

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"

	"a.localcluster/layout"
	"a.localcluster/network"
)

func snapshot(t *testing.T, dir layout.Dir) map[string]string {
	t.Helper()
	files, err := filepath.Glob(dir.Secret("*"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range files {
		st, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o", f, st.Mode().Perm())
		}
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		out[filepath.Base(f)] = string(text)
	}
	return out
}

func TestSecretsArePrivateAndStayWhatTheyAre(t *testing.T) {
	dir := layout.Dir(t.TempDir())
	if err := Write(dir, layout.Nodes(dir, 1)); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, dir)
	if err := Write(dir, layout.Nodes(dir, 2)); err != nil { // started again, with one node more
		t.Fatal(err)
	}
	after := snapshot(t, dir)
	for name, text := range before {
		if name != "tokens.csv" && after[name] != text {
			t.Errorf("%s has changed", name)
		}
	}
	if after["kubelet-node2.token"] == "" || after["kubelet-node2.token"] == after["kubelet-node1.token"] {
		t.Error("the new node has no token of its own")
	}
}

func TestAPIServerIsTrustedUnderItsNames(t *testing.T) {
	dir := layout.Dir(t.TempDir())
	if err := Write(dir, layout.Nodes(dir, 1)); err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(dir.Secret("ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	pair, err := tls.LoadX509KeyPair(dir.Secret("apiserver.crt"), dir.Secret("apiserver.key"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"127.0.0.1", network.IPv4.APIServer, network.IPv6.APIServer, "kubernetes.default.svc"} {
		if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: name}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
