package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/router"
)

// The file named by the flags decides who is in the fleet, while the router runs.
func TestWorkersFileFeedsTheRouter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "workers.json")
		put := func(text string) {
			t.Helper()
			if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)); err != nil {
				t.Fatal(err)
			}
		}
		put(`{"workers":[{"leg":"prefill","url":"http://p0:1","bootstrap_port":9},{"leg":"decode","url":"http://d0:1"}]}`)
		f := fleetFlags{file: path, fileEvery: time.Second}
		sources, err := f.sources()
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.DiscardHandler)
		rt, err := router.New(router.Config{Dynamic: f.named(), Log: log, DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, errors.New("nobody is there")
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer rt.Close()
		defer feed(t.Context(), rt, log, sources)()
		sees := func(what string, want, not string) {
			t.Helper()
			<-time.After(1500 * time.Millisecond)
			rec := httptest.NewRecorder()
			rt.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/workers", nil))
			body := rec.Body.String()
			if !strings.Contains(body, want) || strings.Contains(body, not) {
				t.Fatalf("%s: %s; want %s and not %s", what, body, want, not)
			}
		}
		sees("at first", `"id":"decode-d0:1"`, "d1:1")
		put(`{"workers":[{"leg":"prefill","url":"http://p0:1","bootstrap_port":9},{"leg":"decode","url":"http://d1:1"}]}`)
		sees("changed", `"id":"decode-d1:1"`, "d0:1")
		put(`{"workers":[`)
		sees("broken", `"id":"decode-d1:1"`, "d0:1")
	})
}

func TestFleetFlagsAreChecked(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("short\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, f := range map[string]fleetFlags{
		"--workers-dns":     {dns: []string{"leg"}, dnsEvery: 1},
		"is named twice":    {dns: []string{"leg=decode,host=a,port=1", "leg=decode,host=a,port=1"}, dnsEvery: 1},
		"in a pod":          {kube: "baton.dev/leg"},
		"the interval must": {file: "a"},
		"no such file":      {adminToken: token + "x"},
		"has 5 characters":  {adminToken: token},
	} {
		_, err := f.sources()
		if err == nil {
			_, err = f.token()
		}
		if err == nil || !strings.Contains(err.Error(), want) || !errors.As(err, new(usageError)) {
			t.Errorf("error %v; want %q, as a usage error", err, want)
		}
	}
}
