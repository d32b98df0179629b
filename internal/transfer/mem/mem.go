// Package mem is the reference transport: both ends in one process, no socket and no
// shared mapping, and every word of the contract in package transfer kept. Tests
// of the layers above use it, and the other transports are measured against it.
//
// # Who runs what
//
// A [Transport] finds targets through a [Registry]. Each connection has two
// goroutines: the peer's copies segments and calls Done; the target's calls
// Sink.Landed, so that a Sink that hangs cannot keep Peer.Close from returning.
// Peer.Close waits for the first, Target.Close for the other.
//
// # Fencing
//
// Bytes are copied in slices of [sliceBytes] under the read lock of their grant.
// Revoke takes the write lock, so when it returns no copy is under way and the next
// slice sees the grant revoked.
//
// # Lock order
//
// Registry.mu, the lock of the target's book ([grants.Book]), guard.mu; conn has no lock. Sink and Done are called
// under none of them.
package mem

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"github.com/baton-pd/baton/internal/transfer"
)

// Kind is the transport's name in descriptors and metrics.
const Kind = "mem"

// sliceBytes bounds how long Revoke waits for a copy under way: some 30 µs.
const sliceBytes = 256 << 10

// maxSegments of one write, so that ErrTooLarge exists here too.
const maxSegments = 1 << 16

// DefaultQueue is how many writes a peer holds before Post answers ErrBusy.
const DefaultQueue = 256

// Registry is the network: it knows the live targets by address.
type Registry struct {
	mu      sync.Mutex
	last    uint64
	targets map[string]*target
}

// NewRegistry makes an empty network.
func NewRegistry() *Registry { return &Registry{targets: make(map[string]*target)} }

func (r *Registry) add(t *target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	t.addr = "mem-" + strconv.FormatUint(r.last, 10)
	r.targets[t.addr] = t
}

func (r *Registry) remove(addr string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.targets, addr)
}

func (r *Registry) find(addr string) *target {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.targets[addr]
}

// Option changes a Transport.
type Option func(*Transport)

// Queue sets how many writes a peer holds before Post answers ErrBusy; n >= 1.
func Queue(n int) Option { return func(t *Transport) { t.queue = max(n, 1) } }

// Transport implements transfer.Transport.
type Transport struct {
	reg   *Registry
	queue int
}

// New makes a transport on this network; nil: a network of its own.
func New(r *Registry, opts ...Option) *Transport {
	if r == nil {
		r = NewRegistry()
	}
	t := &Transport{reg: r, queue: DefaultQueue}
	for _, o := range opts {
		o(t)
	}
	return t
}

// Kind is "mem".
func (t *Transport) Kind() string { return Kind }

// Caps: Revoke fences.
func (t *Transport) Caps() transfer.Caps { return transfer.Caps{Fences: true} }

// Listen registers m on the network.
func (t *Transport) Listen(m transfer.Memory, sink transfer.Sink) (transfer.Target, error) {
	tgt := newTarget(t.reg, m.Bytes, sink)
	t.reg.add(tgt)
	return tgt, nil
}

// Reachable reports whether the target is on this network now.
func (t *Transport) Reachable(d transfer.Descriptor) bool {
	return d.Kind == Kind && t.reg.find(d.Addr) != nil
}

// Dial connects to the target if it has session s open.
func (t *Transport) Dial(ctx context.Context, d transfer.Descriptor, s transfer.SessionID) (transfer.Peer, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("mem: dial %s: %w", d.Addr, err)
	}
	tgt := t.reg.find(d.Addr)
	if d.Kind != Kind || tgt == nil {
		return nil, fmt.Errorf("mem: dial %s %s: %w", d.Kind, d.Addr, transfer.ErrPeerLost)
	}
	p := newPeer(t.queue)
	if err := tgt.connect(p.conn, s); err != nil {
		return nil, fmt.Errorf("mem: dial %s session %d: %w", d.Addr, s, err)
	}
	go p.run()
	return p, nil
}
