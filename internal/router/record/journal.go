package record

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// Journal holds the requests in flight and the latest that have ended. Safe for concurrent use.
type Journal struct {
	mu       sync.Mutex
	last     uint64 // number of the latest request
	live     Entry  // head of a ring of the live ones, newest first
	count    int    // of them
	recent   ring
	failures ring
}

// ring keeps the latest entries.
type ring struct {
	slots []*Entry
	next  int
}

func (r *ring) add(e *Entry) {
	if len(r.slots) == 0 {
		return
	}
	r.slots[r.next] = e
	r.next = (r.next + 1) % len(r.slots)
}

// NewJournal keeps the latest recent requests, and of those that failed the latest failures. Negative is 0.
func NewJournal(recent, failures int) *Journal {
	j := &Journal{recent: ring{slots: make([]*Entry, max(recent, 0))}, failures: ring{slots: make([]*Entry, max(failures, 0))}}
	j.live.prev, j.live.next = &j.live, &j.live
	return j
}

// Begin opens the record of a request that arrived at now. Its End must be called.
func (j *Journal) Begin(now time.Time, path, client string) *Entry {
	e := &Entry{j: j}
	e.rec = Record{Start: now, Path: path, Client: client, FirstByte: Never, End: Never}
	e.rec.Attempts = e.room[:0]
	j.mu.Lock()
	defer j.mu.Unlock()
	j.last++
	e.rec.ID = j.last
	j.count++
	e.prev, e.next = &j.live, j.live.next
	e.prev.next, e.next.prev = e, e
	return e
}

// Unkept is Begin for a request that the journal does not keep, but for its number.
func (j *Journal) Unkept(now time.Time, path, client string) *Entry {
	e := &Entry{}
	e.rec = Record{Start: now, Path: path, Client: client, FirstByte: Never, End: Never}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.last++
	e.rec.ID = j.last
	return e
}

// ended moves e from the live ones to the rings.
func (j *Journal) ended(e *Entry, outcome string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e.prev.next, e.next.prev = e.next, e.prev
	e.prev, e.next = nil, nil
	j.count--
	j.recent.add(e)
	if outcome == Failed || outcome == StreamError {
		j.failures.add(e)
	}
}

// Live is the number of requests in flight.
func (j *Journal) Live() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.count
}

// Latest copies at most most records, those in flight first, of which the oldest are taken (who hangs is of interest), and then the latest that ended. They come
// oldest first.
func (j *Journal) Latest(most int) []Record {
	j.mu.Lock()
	entries := make([]*Entry, 0, min(most, j.count+len(j.recent.slots)+len(j.failures.slots)))
	for e := j.live.prev; e != &j.live && len(entries) < most; e = e.prev {
		entries = append(entries, e)
	}
	seen := map[*Entry]bool{}
	for _, r := range []*ring{&j.recent, &j.failures} {
		for i := range r.slots {
			e := r.slots[(r.next-1-i+2*len(r.slots))%len(r.slots)]
			if e == nil || len(entries) == most {
				break
			}
			if !seen[e] {
				seen[e] = true
				entries = append(entries, e)
			}
		}
	}
	j.mu.Unlock()
	out := make([]Record, 0, len(entries))
	for _, e := range entries { // each under its own lock
		out = append(out, e.Snapshot())
	}
	slices.SortFunc(out, func(a, b Record) int { return cmp.Compare(a.ID, b.ID) })
	return out
}
