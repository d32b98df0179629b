package hub

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/kv"
)

// Pages that come back at their deadline are no news; pages that do not are told, once.
func TestOverduePagesAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		pool, err := kv.Open(kv.Config{Name: "landing", PageBytes: 64, Pages: 4, Plain: true})
		if err != nil {
			t.Fatal(err)
		}
		a := newPrealloc(pool, log)
		take := func(label string) *kv.Lease {
			l, err := a.wait(t.Context(), nil, nil, 1, label, time.Now().Add(time.Second))
			if err != nil {
				t.Fatal(err)
			}
			if !l.Grant() {
				t.Fatal("no grant")
			}
			return l
		}
		soon, stuck := take("room 1"), take("room 2")
		time.AfterFunc(time.Second+100*time.Millisecond, func() { // the deadline's own abort was answered
			soon.ReleaseRequest()
			soon.ReleaseTransfer(kv.ProofDrained)
			stuck.ReleaseRequest()
		})
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		<-ctx.Done()
		synctest.Wait()
		if s := out.String(); strings.Contains(s, "room 1") || strings.Count(s, "room 2") != 1 {
			t.Errorf("want one line about room 2 and none about room 1, got:\n%s", s)
		}
		stuck.ReleaseTransfer(kv.ProofFenced)
		a.close()
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	})
}
