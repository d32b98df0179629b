// Package etcd is a source of workers in etcd: each key under a prefix is one worker in JSON, as package discovery
// writes it. Whoever starts a worker puts its key with a lease and keeps the lease alive; when that ends, the key goes,
// and the worker is drained.
package etcd

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/baton-pd/baton/internal/discovery"
)

// Config of a [Source]. Zero values take the defaults in brackets.
type Config struct {
	Endpoints []string // host:port or URLs
	Prefix    string   // [/baton/workers/]
	// Username and Password, for etcd with users; TLS, for https.
	Username, Password string
	TLS                *tls.Config
	// Resync is how often everything is read again although a watch is open [30s]: the check that etcd is there.
	Resync time.Duration
	// Timeout bounds one reading [5s].
	Timeout time.Duration
	// Retry is the pause after a failure [200ms]; it doubles up to 5s.
	Retry time.Duration
}

const maxRetry = 5 * time.Second

// Source reads and watches the keys.
type Source struct {
	c  Config
	cl *clientv3.Client
	// last are the workers by key, as last read: the owner is Run.
	last map[string]*discovery.Worker
	bad  map[string]error
}

// New checks c and makes a client; etcd need not be there yet. Close ends it.
func New(c Config) (*Source, error) {
	if len(c.Endpoints) == 0 {
		return nil, errors.New("etcd: no endpoint")
	}
	if c.Prefix == "" {
		c.Prefix = "/baton/workers/"
	}
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{{&c.Resync, 30 * time.Second}, {&c.Timeout, 5 * time.Second}, {&c.Retry, 200 * time.Millisecond}} {
		if *d.v < 0 {
			return nil, fmt.Errorf("etcd: a negative duration: %v", *d.v)
		}
		if *d.v == 0 {
			*d.v = d.d
		}
	}
	cl, err := clientv3.New(clientv3.Config{
		Endpoints: c.Endpoints, Username: c.Username, Password: c.Password, TLS: c.TLS,
		// A peer that vanished without a word is noticed; the server allows one ping in 5 s.
		DialTimeout: c.Timeout, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: c.Timeout,
	})
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return &Source{c: c, cl: cl}, nil
}

// Close ends the client; after Run has returned.
func (s *Source) Close() error { return s.cl.Close() }

// Name is "etcd:" and the prefix.
func (s *Source) Name() string { return "etcd:" + s.c.Prefix }

// Run implements [discovery.Source]. It reads all keys and watches for changes from that revision on, and begins anew when
// the watch ends: by the resync interval, a compaction, or a lost connection.
func (s *Source) Run(ctx context.Context, report discovery.Report) {
	discovery.Follow(ctx, "etcd", s.c.Retry, maxRetry, report, s.load, s.tell, s.watch)
}

// load reads every key and returns the revision it saw.
func (s *Source) load(ctx context.Context) (rev int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.c.Timeout)
	defer cancel()
	got, err := s.cl.Get(ctx, s.c.Prefix, clientv3.WithPrefix())
	if err != nil {
		return 0, fmt.Errorf("read the keys under %s at %s: %w", s.c.Prefix, strings.Join(s.c.Endpoints, ","), err)
	}
	s.last, s.bad = map[string]*discovery.Worker{}, map[string]error{}
	for _, kv := range got.Kvs {
		s.put(kv)
	}
	return got.Header.Revision, nil
}

// put takes in one key. A broken one hides no others: the last sound value of the key stays, if there is one.
func (s *Source) put(kv *mvccpb.KeyValue) {
	key := string(kv.Key)
	var w discovery.Worker
	d := json.NewDecoder(bytes.NewReader(kv.Value))
	d.DisallowUnknownFields()
	err := d.Decode(&w)
	if err == nil {
		err = w.Check()
	}
	if err != nil {
		s.bad[key] = err
		return
	}
	delete(s.bad, key)
	s.last[key] = &w
}

// watch applies changes until the resync is due (nil), or the watch fails.
func (s *Source) watch(ctx context.Context, from int64, report discovery.Report) error {
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), s.c.Resync)
	defer cancel()
	for resp := range s.cl.Watch(ctx, s.c.Prefix, clientv3.WithPrefix(), clientv3.WithRev(from)) {
		if resp.CompactRevision > 0 {
			return nil // what happened in between cannot be told any more: read everything
		}
		if err := resp.Err(); err != nil && ctx.Err() == nil {
			return fmt.Errorf("watch the keys under %s: %w", s.c.Prefix, err)
		}
		if len(resp.Events) == 0 {
			continue
		}
		for _, e := range resp.Events {
			if e.Type == clientv3.EventTypeDelete {
				delete(s.last, string(e.Kv.Key))
				delete(s.bad, string(e.Kv.Key))
			} else {
				s.put(e.Kv)
			}
		}
		s.tell(report)
	}
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("the watch of the keys under %s ended", s.c.Prefix)
}

// tell reports the present set, and then, if there are any, one of the broken keys.
func (s *Source) tell(report discovery.Report) {
	set := make([]discovery.Worker, 0, len(s.last))
	seen := map[string]bool{}
	for _, w := range s.last {
		if id := w.Leg + " " + w.URL; !seen[id] { // two keys for one worker are a harmless repetition
			seen[id] = true
			set = append(set, *w)
		}
	}
	discovery.Sort(set)
	report(set, nil)
	for key, err := range s.bad {
		report(nil, fmt.Errorf("etcd: key %s: %w", key, err))
		return
	}
}
