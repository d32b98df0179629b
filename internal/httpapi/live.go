package httpapi

import (
	"maps"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// liveRequests finds requests by the ids that clients gave them. Such ids need not
// be unique, so they never reach the scheduler as keys: an abort by id hits every
// live request of that name.
//
// An abort may overtake its request. If it hits nothing, and no request of that name
// ended a moment ago, it is remembered: the next request of that name is born
// aborted. It is used up by that one request.
type liveRequests struct {
	mu     sync.Mutex
	byID   map[string]map[*liveRequest]struct{}
	recent map[string]memory
	order  []string // keys of recent, oldest first; may name keys already gone
	now    func() time.Time
}

// memory is what is remembered of an id: it ended, or an abort came too early.
type memory struct {
	until   time.Time
	aborted bool
}

// liveRequest is one registered request.
type liveRequest struct {
	ids    []string
	cancel func(*room.Cause)
}

const (
	rememberFor  = 10 * time.Second
	rememberMost = 4096
)

func newLiveRequests(now func() time.Time) *liveRequests {
	return &liveRequests{byID: map[string]map[*liveRequest]struct{}{}, recent: map[string]memory{}, now: now}
}

// add registers a request. aborted: its abort has come already; it is not registered then.
func (l *liveRequests) add(ids []string, cancel func(*room.Cause)) (lr *liveRequest, aborted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		if m, ok := l.recent[id]; ok && m.aborted && l.now().Before(m.until) {
			delete(l.recent, id)
			return nil, true
		}
	}
	lr = &liveRequest{ids: ids, cancel: cancel}
	for _, id := range ids {
		if l.byID[id] == nil {
			l.byID[id] = map[*liveRequest]struct{}{}
		}
		l.byID[id][lr] = struct{}{}
	}
	return lr, false
}

// remove ends a registration.
func (l *liveRequests) remove(lr *liveRequest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range lr.ids {
		delete(l.byID[id], lr)
		if len(l.byID[id]) == 0 {
			delete(l.byID, id)
		}
		l.remember(id, false)
	}
}

// remember notes an id; the oldest notes go when there are too many. Caller holds mu.
func (l *liveRequests) remember(id string, aborted bool) {
	now := l.now()
	for len(l.order) > 0 {
		m, ok := l.recent[l.order[0]]
		if ok && now.Before(m.until) && len(l.order) < rememberMost {
			break
		}
		delete(l.recent, l.order[0])
		l.order = l.order[1:]
	}
	if _, ok := l.recent[id]; !ok {
		l.order = append(l.order, id)
	}
	l.recent[id] = memory{until: now.Add(rememberFor), aborted: aborted}
}

// abort cancels the live requests called id ("": all) and says how many it hit.
func (l *liveRequests) abort(id string, c *room.Cause) int {
	l.mu.Lock()
	hit := map[*liveRequest]struct{}{}
	for lr := range l.byID[id] {
		hit[lr] = struct{}{}
	}
	if id == "" {
		for _, set := range l.byID {
			maps.Copy(hit, set)
		}
	}
	if id != "" && len(hit) == 0 {
		if m, ok := l.recent[id]; !ok || !l.now().Before(m.until) {
			l.remember(id, true)
		}
	}
	l.mu.Unlock()
	for lr := range hit { // without the lock: cancelling reaches into the scheduler
		lr.cancel(c)
	}
	return len(hit)
}

// count is the number of names of live requests, 0 at the idle baseline.
func (l *liveRequests) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.byID)
}
