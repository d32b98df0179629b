package router

import (
	"net"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/router/record"
)

// How many ended requests the journal keeps: the latest, and the latest that failed.
const (
	recentRecords  = 256
	recentFailures = 64
)

// usage is what an answer says of its tokens; completion 0: nothing.
type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
}

// usage of an answer or event, in either's place. What makes no sense is no usage: it is only shown.
func (a *answer) usage() (u usage) {
	if a.Meta != nil {
		prompt, err := strconv.Atoi(string(a.Meta.Prompt))
		if completion, err2 := strconv.Atoi(string(a.Meta.Completion)); err == nil && err2 == nil && prompt >= 0 && completion >= 0 {
			return usage{prompt, completion}
		}
	}
	if len(a.Usage) == 0 || decodeUsage(a.Usage, &u) != nil || u.Prompt < 0 || u.Completion < 0 {
		return usage{}
	}
	return u
}

// note keeps a usage that says something.
func (s *stream) note(u usage) {
	if u.Completion > 0 {
		s.usage = u
	}
}

// clientHost is the address without its port, which says nothing.
func clientHost(addr string) string {
	if host, _, err := net.SplitHostPort(addr); err == nil {
		return host
	}
	return addr
}

// record begins the attempt's part of the request's record.
func (a *attempt) record() {
	at := record.Attempt{Room: a.rooms[0], Rooms: len(a.rooms), Kind: string(a.decode.w.is().kind), Decode: a.decode.w.name}
	if a.prefill.w != noWorker {
		at.Prefill = a.prefill.w.name
	}
	a.c.rec.Try(a.start, at)
}

// recordCause is a failure for the record; nil for none.
func recordCause(f *failure) *record.Cause {
	if f == nil {
		return nil
	}
	c := f.cause()
	return &record.Cause{Code: string(c.Code), Side: c.Side.String(), Phase: c.Phase, Worker: c.Peer, Detail: c.Detail}
}

// recordEnd closes the record and writes it down.
func (r *Router) recordEnd(cl *client, outcome string, f *failure) {
	cl.rec.Named(cl.w.Header().Get(edge.HeaderRequestID)) // also where it was refused unread
	cl.rec.End(time.Now(), cl.first, cl.status, outcome, recordCause(f))
	r.cfg.AccessLog.Put(cl.rec)
}
