package fault

import (
	"sync"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// target stands between the real target and its Sink, on both sides.
type target struct {
	transfer.Target // set by Listen before it returns
	kind            string
	rules           *Rules
	sink            transfer.Sink
	stop            chan struct{} // closed by Close

	mu     sync.Mutex
	keys   map[transfer.GrantID]transfer.Grant // to find the room of a landing
	closed bool
	wg     sync.WaitGroup // held Fenced and Revoked calls; Add under mu and only while not closed
}

func newTarget(kind string, r *Rules, sink transfer.Sink) *target {
	return &target{kind: kind, rules: r, sink: sink, stop: make(chan struct{}), keys: make(map[transfer.GrantID]transfer.Grant)}
}

// Allow remembers the room of the grant.
func (t *target) Allow(g transfer.Grant) error {
	t.mu.Lock()
	_, known := t.keys[g.ID]
	if !known {
		t.keys[g.ID] = transfer.Grant{Key: g.Key, Session: g.Session}
	}
	t.mu.Unlock()
	err := t.Target.Allow(g)
	if err != nil && !known {
		t.forget(func(id transfer.GrantID, _ transfer.Grant) bool { return id == g.ID })
	}
	return err
}

func (t *target) forget(which func(transfer.GrantID, transfer.Grant) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, g := range t.keys {
		if which(id, g) {
			delete(t.keys, id)
		}
	}
}

func (t *target) key(id transfer.GrantID) room.Key {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.keys[id].Key
}

// Revoke revokes, and may lie about the fence.
func (t *target) Revoke(id transfer.GrantID) bool {
	v := t.rules.decide(opRevoke, t.kind, t.key(id))
	fenced := t.Target.Revoke(id)
	t.mu.Lock()
	defer t.mu.Unlock()
	if fenced && v.action() == actUnfenced {
		// The entry stays until the news is told or the session's end makes it void.
		if (v.rule.gate != "" || v.rule.hold > 0) && !t.closed {
			t.wg.Go(func() {
				if t.rules.wait(v.rule, t.stop, nil) && t.take(id) {
					t.Revoked(id)
				}
			})
		}
		return false
	}
	delete(t.keys, id)
	return fenced
}

// take removes a grant's entry and reports whether there was one.
func (t *target) take(id transfer.GrantID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.keys[id]
	delete(t.keys, id)
	return ok
}

// Revoked passes on what a draining transport says, if the real Sink wants to hear it.
func (t *target) Revoked(id transfer.GrantID) {
	if s, ok := t.sink.(transfer.RevokeSink); ok {
		s.Revoked(id)
	}
}

// CloseSession forgets the session's grants.
func (t *target) CloseSession(s transfer.SessionID) {
	t.Target.CloseSession(s)
	t.forget(func(_ transfer.GrantID, g transfer.Grant) bool { return g.Session == s })
}

// Landed is the Sink of the real target. A hold blocks it, so the write stays
// incomplete on the other side.
func (t *target) Landed(g transfer.GrantID, notify []byte) {
	v := t.rules.decide(opLanded, t.kind, t.key(g))
	switch v.action() {
	case actDrop:
		return
	case actStall:
		t.rules.wait(v.rule, t.stop, nil)
	}
	t.sink.Landed(g, notify)
}

// Fenced is the Sink of the real target. A hold does not block it: the fence is up,
// only the news is late.
func (t *target) Fenced(s transfer.SessionID) {
	t.forget(func(_ transfer.GrantID, g transfer.Grant) bool { return g.Session == s })
	v := t.rules.decide(opFenced, t.kind, room.Key{})
	if v.action() == actStall {
		t.mu.Lock()
		held := !t.closed
		if held {
			t.wg.Go(func() {
				t.rules.wait(v.rule, t.stop, nil)
				t.sink.Fenced(s)
			})
		}
		t.mu.Unlock()
		if held {
			return
		}
	}
	t.sink.Fenced(s)
}

// Close lets go of what is held, closes the real target and waits.
func (t *target) Close() error {
	t.mu.Lock()
	if !t.closed {
		t.closed = true
		close(t.stop)
	}
	t.mu.Unlock()
	err := t.Target.Close()
	t.wg.Wait()
	return err
}
