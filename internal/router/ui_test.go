package router

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/router/record"
)

// page is a viewer of /ui/events.
type page struct {
	t    *testing.T
	resp *http.Response
	r    *bufio.Reader
	stop context.CancelFunc
}

func (b *bed) watch(header ...string) *page {
	b.t.Helper()
	ctx, stop := context.WithCancel(b.t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://router/ui/events", nil)
	if err != nil {
		b.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := b.client.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	return &page{t: b.t, resp: resp, r: bufio.NewReader(resp.Body), stop: stop}
}

func (p *page) close() {
	p.stop()
	_ = p.resp.Body.Close()
}

// next is the next state.
func (p *page) next() (s uiState) {
	p.t.Helper()
	for {
		line, err := p.r.ReadString('\n')
		if err != nil {
			p.t.Fatal(err)
		}
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			if err := json.Unmarshal([]byte(data), &s); err != nil {
				p.t.Fatal(err)
			}
			return s
		}
	}
}

// tellRooms makes f a Baton worker that tells of the room of its first request.
func tellRooms(f *fake, report string) {
	f.info = func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/rooms":
			f.mu.Lock()
			id := "0"
			if len(f.legs) > 0 {
				id = f.legs[0].room()
			}
			f.mu.Unlock()
			say(200, strings.ReplaceAll(report, "ROOM", id))(w, r, nil)
		default:
			say(200, `{"allow_local":false,"state":{"pages_total":10,"pages_free":7,"pages_quarantine":1,"cells_total":64,"cells_used":5}}`)(w, r, nil)
		}
	}
}

// TestUIStream: a viewer is told of a request as it goes, with what its workers say, and once more nothing of it when it is over.
func TestUIStream(t *testing.T) {
	inBubble(t, Config{}, []script{after(time.Second, okPrefill)}, []script{sse(2*time.Second, role, token, 2*time.Second, last, usageEvent, done)}, func(t *testing.T, b *bed, p, d []*fake) {
		tellRooms(p[0], `{"role":"prefill","rooms":[{"room":"ROOM","phase":"prefilling","granted_ms":1,"chunks":[[2,500]],"chunks_total":2,"prompt_tokens":9}]}`)
		tellRooms(d[0], `{"role":"decode","rooms":[{"room":"ROOM","phase":"transferring","granted_ms":1,"chunks":[[600,600]],"chunks_total":2,"prompt_tokens":9,"tokens":3}]}`)
		for _, w := range b.r.all() {
			w.nature.Store(&nature{kind: KindBaton})
		}
		v := b.watch()
		defer v.close()
		if s := v.next(); len(s.Workers) != 2 || s.Workers[0].Name != "p0:80" || s.Workers[0].PagesFree != 7 || s.Workers[1].CellsUsed != 5 || !s.Operator || len(s.Requests) != 0 {
			t.Fatalf("first state %+v", s)
		}
		ended := make(chan struct{})
		go func() {
			b.chatStream()
			close(ended)
		}()
		<-time.After(900 * time.Millisecond) // the ticks at 500 ms saw it
		s := v.next()
		if len(s.Requests) != 1 || s.Inflight != 1 || s.Phases["prefill"]["prefilling"] != 1 || s.Phases["decode"]["transferring"] != 1 || s.Phases["router"]["waiting"] != 1 {
			t.Fatalf("state %+v", s)
		}
		r := s.Requests[0]
		if r.Phase != "waiting" || r.Outcome != "" || r.WorkerTokens != 3 || r.Prompt != 9 || len(r.Attempts) != 1 || r.Attempts[0].At != "prefill: prefilling, decode: transferring" {
			t.Errorf("request %+v", r)
		}
		var legs []string
		for _, l := range r.Lanes {
			legs = append(legs, l.Leg)
		}
		if strings.Join(legs, " ") != "router prefill kv decode" || r.Lanes[1].Bars[1].Kind != record.BarChunk || len(r.Lanes[2].Ticks) != 1 {
			t.Errorf("lanes %+v", r.Lanes)
		}
		<-ended
		last := uiRequest{}
		quiet := 0
		for range 30 { // it is looked at for some seconds after its end
			if s = v.next(); len(s.Requests) == 0 {
				quiet++
				continue
			}
			if quiet > 0 && s.Requests[0].Outcome != "" {
				t.Fatal("a request that is over is told of again")
			}
			last = s.Requests[0]
		}
		if last.Outcome != record.OK || last.Tokens != 2 || last.Phase != "ended" || quiet == 0 {
			t.Errorf("at the end %+v, %d quiet states", last, quiet)
		}
		second := b.watch()
		defer second.close()
		if s := second.next(); len(s.Requests) != 1 || s.Requests[0].ID != last.ID {
			t.Errorf("another viewer begins with %+v", s.Requests)
		}
	})
}

// TestUIEnds: viewers that leave are forgotten, too many are refused, and one that stays does not hold up a router that drains.
func TestUIEnds(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, _, _ []*fake) {
		var all []*page
		for range uiViewers {
			v := b.watch()
			v.next()
			all = append(all, v)
		}
		over := b.watch()
		if over.resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("one too many got %d", over.resp.StatusCode)
		}
		over.close()
		for _, v := range all[1:] {
			v.close()
		}
		<-time.After(2 * uiEvery)
		synctest.Wait()
		again := b.watch()
		again.next()
		again.close()
		b.r.Drain()
		start := time.Now()
		for {
			if _, err := all[0].r.ReadString('\n'); err != nil {
				break
			}
		}
		if took := time.Since(start); took > 2*uiEvery {
			t.Errorf("a viewer stayed %v after the drain", took)
		}
		all[0].close()
	})
}

// TestUIOff: there is nothing at /ui, and its paths are not open where keys are wanted.
func TestUIOff(t *testing.T) {
	inBubble(t, Config{NoUI: true}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, _, _ []*fake) {
		for _, path := range []string{"/ui", "/ui/app.js", "/ui/events"} {
			if g := b.get(path); g.status != http.StatusNotFound {
				t.Errorf("%s: %d", path, g.status)
			}
		}
	})
}
