package edge

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Keys are the clients that a file lists, and what they are doing. Its methods are safe for concurrent use.
type Keys struct {
	path string
	now  func() time.Time
	ring atomic.Pointer[ring]

	mu sync.Mutex
	// use is by name and outlives changes of the file: a client's requests and bucket stay its own. It holds the names that are
	// listed, and others while they have requests.
	use map[string]*usage
}

// usage is what a client does now. Under Keys.mu.
type usage struct {
	key      *Key // nil: not listed any more
	inflight int
	bucket   Bucket
}

// OpenKeys reads a key file.
func OpenKeys(path string) (*Keys, error) {
	k := &Keys{path: path, now: time.Now, use: map[string]*usage{}}
	if err := k.Watched().load(); err != nil {
		return nil, err
	}
	return k, nil
}

// Watched is for [Watch].
func (k *Keys) Watched() Watched {
	return Watched{What: "API keys", Files: []string{k.path}, Apply: k.apply}
}

// apply takes a file's text. Requests that run go on, also those of clients that are not listed any more.
func (k *Keys) apply(texts [][]byte) error {
	r, err := parseRing(texts[0])
	if err != nil {
		return fmt.Errorf("key file %s: %w", k.path, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.now()
	for _, u := range k.use {
		u.key = nil
	}
	for _, key := range r.keys {
		if u := k.use[key.Name]; u == nil {
			k.use[key.Name] = &usage{key: key, bucket: NewBucket(key.PerMinute, now)}
		} else {
			u.key = key
			u.bucket.Resize(key.PerMinute, now)
		}
	}
	for name := range k.use {
		k.forget(name)
	}
	k.ring.Store(r)
	return nil
}

// forget drops who is not listed and idle. Under mu.
func (k *Keys) forget(name string) {
	if u := k.use[name]; u.key == nil && u.inflight == 0 {
		delete(k.use, name)
	}
}

// Find is the client whose key this is; nil if it is nobody's.
func (k *Keys) Find(key string) *Key { return k.ring.Load().find(key) }

// Count is the number of clients listed.
func (k *Keys) Count() int { return len(k.ring.Load().keys) }

// LimitError is why a client's request is not taken now.
type LimitError struct {
	Name   string // of the client
	Reason string // ReasonInflight or ReasonRate
	Limit  int
	After  time.Duration // when it may be worth to come again
}

// Reasons of a refusal, for metrics.
const (
	ReasonNoKey    = "no_key"
	ReasonBadKey   = "bad_key"
	ReasonOperator = "not_operator"
	ReasonOrigin   = "origin"
	ReasonInflight = "max_inflight"
	ReasonRate     = "per_minute"
	// ReasonConnections is that of [Connections].
	ReasonConnections = "max_connections"
)

// Error says which limit it is.
func (e *LimitError) Error() string {
	if e.Reason == ReasonInflight {
		return fmt.Sprintf("%s has %d requests in flight, as many as it may", e.Name, e.Limit)
	}
	return fmt.Sprintf("%s may make %d requests a minute", e.Name, e.Limit)
}

// Begin counts a request of key. It is to be ended by the function that comes back, once; or the error is a *[LimitError].
func (k *Keys) Begin(key *Key) (end func(), err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	u := k.use[key.Name]
	if u == nil { // it was taken off the list between the check and now
		u = &usage{bucket: NewBucket(0, k.now())}
		k.use[key.Name] = u
	}
	if u.key != nil {
		key = u.key // of two readings the later
	}
	if key.MaxInflight > 0 && u.inflight >= key.MaxInflight {
		return nil, &LimitError{key.Name, ReasonInflight, key.MaxInflight, time.Second}
	}
	if wait := u.bucket.Take(k.now()); wait > 0 {
		return nil, &LimitError{key.Name, ReasonRate, key.PerMinute, wait}
	}
	u.inflight++
	return func() { k.end(key.Name) }, nil
}

func (k *Keys) end(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	u := k.use[name]
	if u == nil || u.inflight < 1 {
		panic("edge: a request of " + name + " ended twice")
	}
	u.inflight--
	k.forget(name)
}

// Inflight is how many requests of a name have not ended.
func (k *Keys) Inflight(name string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	if u := k.use[name]; u != nil {
		return u.inflight
	}
	return 0
}
