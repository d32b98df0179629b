package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/router"
)

// What keygen prints is what the file wants.
func TestKeygen(t *testing.T) {
	var out bytes.Buffer
	if err := keygen(&out, "team-a"); err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`key, for the client: +(\S+)\nline, for the file: +(team-a sha256:[0-9a-f]{64})\n$`).FindStringSubmatch(out.String())
	if m == nil {
		t.Fatalf("it printed %q", out.String())
	}
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, []byte(m[2]+" weight=2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var c router.Config
	if err := (&edgeFlags{keys: file}).configure(&c); err != nil {
		t.Fatal(err)
	}
	if k := c.Keys.Find(m[1]); k == nil || k.Name != "team-a" || k.Weight != 2 {
		t.Errorf("the key is %+v's", k)
	}
	if err := keygen(&out, "team a"); !errors.As(err, new(usageError)) {
		t.Errorf("a name with a space: %v", err)
	}
}

func TestEdgeFlagsAreChecked(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	none, garbage := filepath.Join(dir, "none"), file("garbage", "gar bage\n")
	for want, e := range map[string]edgeFlags{
		"--api-key-file: open ":                   {keys: none},
		"--api-key-file: key file " + garbage:     {keys: garbage},
		"--tls-cert and --tls-key: a certificate": {tls: serverTLS{cert: garbage}},
		"--tls-cert and --tls-key: open ":         {tls: serverTLS{cert: none, key: none}},
		"--worker-cert and --worker-cert-key":     {workerTLS: clientTLS{cert: garbage, key: garbage}},
		"--worker-ca: " + garbage:                 {workerTLS: clientTLS{ca: garbage}},
		"--tls-client-ca needs --tls-cert":        {tls: serverTLS{clientCA: garbage}},
		"--worker-api-key-file: " + garbage:       {workerKey: garbage},
		"--header-timeout must be positive":       {header: -1},
	} {
		err := e.configure(&router.Config{})
		if err == nil || !strings.HasPrefix(err.Error(), want) || !errors.As(err, new(usageError)) {
			t.Errorf("error %v; want %q, as a usage error", err, want)
		}
	}
	var c router.Config
	key := file("key", " secret-of-workers \n")
	if err := (&edgeFlags{workerKey: key}).configure(&c); err != nil || c.WorkerKey != "secret-of-workers" || c.ClientStall >= 0 {
		t.Errorf("%+v, %v", c, err)
	}
	if _, err := router.New(router.Config{Dynamic: true, CORS: edge.CORS{Origins: []string{"*"}, Credentials: true}}); err == nil {
		t.Error("every origin with credentials is taken")
	}
}
