package httpapi

import (
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// liveRequests finds requests by the ids that clients gave them. Such ids need not
// be unique, so they never reach the scheduler as keys: an abort by id hits every
// live request of that name. The router, which means one attempt of one request, names
// its room too.
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
	rooms  []uint64
	cancel func(*room.Cause)
}

const (
	rememberFor  = 10 * time.Second
	rememberMost = 4096
)

func newLiveRequests(now func() time.Time) *liveRequests {
	return &liveRequests{byID: map[string]map[*liveRequest]struct{}{}, recent: map[string]memory{}, now: now}
}

// ofRoom is the key of an early abort that names a room. Ids have no spaces.
func ofRoom(id string, room uint64) string { return id + " " + strconv.FormatUint(room, 10) }

// add registers a request. aborted: its abort has come already; it is not registered then.
func (l *liveRequests) add(ids []string, rooms []uint64, cancel func(*room.Cause)) (lr *liveRequest, aborted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	early := func(key string) bool {
		m, ok := l.recent[key]
		if !ok || !m.aborted || !l.now().Before(m.until) {
			return false
		}
		delete(l.recent, key)
		return true
	}
	for _, id := range ids {
		if early(id) {
			return nil, true
		}
		for _, r := range rooms {
			if early(ofRoom(id, r)) {
				return nil, true
			}
		}
	}
	lr = &liveRequest{ids: ids, rooms: rooms, cancel: cancel}
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

// abort cancels the live requests that a means and says how many it hit.
func (l *liveRequests) abort(a openai.Abort, c *room.Cause) int {
	l.mu.Lock()
	hit := map[*liveRequest]struct{}{}
	key := a.RID
	if a.OfRoom {
		key = ofRoom(a.RID, a.Room)
	}
	for lr := range l.byID[a.RID] {
		if !a.OfRoom || slices.Contains(lr.rooms, a.Room) {
			hit[lr] = struct{}{}
		}
	}
	if a.All {
		for _, set := range l.byID {
			maps.Copy(hit, set)
		}
	}
	if !a.All && len(hit) == 0 {
		if m, ok := l.recent[key]; !ok || !l.now().Before(m.until) {
			l.remember(key, true)
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
