package router

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/openai"
)

// TestEveryRequestEndsOnce: whatever workers do, each request ends by its deadline and half a second with a whole
// answer, an error, or a stream that has one error event and breaks off; never with two of these, and never with less than it says. All
// workers are rid of it a second later. BATON_PROVE=1 takes many more seeds, and other ones each time; BATON_SEED=N is one of them.
func TestEveryRequestEndsOnce(t *testing.T) {
	first, count := uint64(1), uint64(200)
	if os.Getenv("BATON_PROVE") != "" {
		first, count = uint64(time.Now().UnixNano()), 4000
	}
	if s := os.Getenv("BATON_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		first, count = n, 1
	}
	sum := endings{}
	for seed := first; seed < first+count; seed++ {
		ok := t.Run("", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { sum.add(unrulyFleet(t, seed)) })
		})
		if !ok {
			t.Fatalf("again with BATON_SEED=%d", seed)
		}
	}
	t.Logf("seeds %d to %d: %v", first, first+count-1, sum)
	if count > 1 && (sum["answered"] == 0 || sum["refused"] == 0 || sum["broken off"] == 0 || sum["left"] == 0) {
		t.Error("an ending was never seen")
	}
}

// endings counts how requests ended.
type endings map[string]int

func (e endings) add(o endings) {
	for k, v := range o {
		e[k] += v
	}
}

// order is one request of a client.
type order struct {
	id       string
	want     want
	body     string
	deadline time.Duration
	leaves   time.Duration // 0: stays
	got      got
	start    time.Time
}

// unrulyFleet runs a router between unruly workers and checks all that happens.
func unrulyFleet(t *testing.T, seed uint64) endings {
	g := rand.New(rand.NewPCG(seed, 7))
	kind := []Kind{KindDetect, KindBaton, KindSGLang, KindVLLM, KindPlain}[g.IntN(5)]
	policies := []string{PolicyRoundRobin, PolicyLeastInflight, "prefix-cache", "pair-cost"}
	limits := []time.Duration{0, 700 * time.Millisecond, 2 * time.Second}
	b := &bed{t: t, net: newMemNet(), log: &lockedLog{}}
	c := Config{
		Policy: policies[g.IntN(4)], MaxRetries: g.IntN(4) - 1, InterTokenTimeout: limits[g.IntN(3)], FirstByteTimeout: limits[g.IntN(3)],
		LocalFallback: g.IntN(2) == 0, MaxAnswer: 1 << 20, MaxPerWorker: g.IntN(3), DialContext: b.net.dial, Log: slog.New(slog.NewTextHandler(b.log, nil)),
	}
	var all []*unruly
	add := func(addr string, prefill bool, k Kind) {
		bad := []float64{0, 0.3, 0.9}[g.IntN(3)]
		all = append(all, b.net.unruly(t, addr, prefill, k, rand.New(rand.NewPCG(g.Uint64(), 1)), bad))
		w := Backend{URL: "http://" + addr, Kind: k, BootstrapPort: 1}
		if prefill {
			c.Prefills = append(c.Prefills, w)
		} else {
			c.Decodes = append(c.Decodes, w)
		}
	}
	for i := range 2 {
		if kind != KindPlain {
			add(fmt.Sprintf("p%d:80", i), true, kind)
		}
		add(fmt.Sprintf("d%d:80", i), false, kind)
	}
	if g.IntN(4) == 0 {
		add("x:80", false, KindPlain)
	}
	defer func() {
		b.close()
		for _, u := range all {
			u.close()
		}
		<-time.After(time.Second) // net/http lingers on connections that it closed itself
	}()
	b.start(c)
	synctest.Wait()
	var orders []*order
	for i := range 6 {
		orders = append(orders, newOrder(g, strconv.Itoa(i)))
	}
	var wg sync.WaitGroup
	for _, o := range orders {
		wg.Go(func() { o.post(b) })
		<-time.After(time.Duration(g.IntN(1500)) * time.Millisecond)
	}
	wg.Wait()
	<-time.After(3 * time.Second)
	sum := endings{}
	for _, o := range orders {
		legs := legsOf(all, o)
		how, err := o.check(legs)
		if err == nil {
			err = released(o, legs)
		}
		if err != nil {
			t.Errorf("seed %d, kind %q, %+v\nrequest %s %s, deadline %v, leaves %v: %v\ngot %d after %v, end %v: %.2000q\nlegs:", seed, kind, c.MaxRetries,
				o.want.path, o.body, o.deadline, o.leaves, err, o.got.status, o.got.took, o.got.err, o.got.body)
			for _, l := range legs {
				t.Errorf("  %s %q, over %v after the request, released %v, aborted %v", l.u.addr, l.fault, l.gone.Sub(o.end()), l.released, max(l.abort.Sub(o.end()), -time.Hour))
			}
		}
		sum[how]++
	}
	return sum
}

// newOrder makes any request.
func newOrder(g *rand.Rand, id string) *order {
	o := &order{id: id, deadline: []time.Duration{1500, 4000, 9000}[g.IntN(3)] * time.Millisecond}
	n, stream := 1+g.IntN(3)*g.IntN(2), g.IntN(3) > 0
	prompt := `"hi"`
	if g.IntN(3) == 0 {
		prompt = `["hi","ho"]`
	}
	path := []string{"/v1/chat/completions", "/v1/completions", "/generate"}[g.IntN(3)]
	switch path {
	case "/generate":
		o.body = fmt.Sprintf(`{"text":%s,"sampling_params":{"n":%d},"stream":%v}`, prompt, n, stream)
	case "/v1/completions":
		o.body = fmt.Sprintf(`{"prompt":%s,"n":%d,"stream":%v}`, prompt, n, stream)
	default:
		o.body = fmt.Sprintf(`{"messages":[{"role":"user","content":"hi"}],"n":%d,"stream":%v}`, n, stream)
	}
	var f map[string]json.RawMessage
	if err := json.Unmarshal([]byte(o.body), &f); err != nil {
		panic(err)
	}
	o.want = askedFor(path, f)
	if g.IntN(6) == 0 {
		o.leaves = time.Duration(1+g.IntN(3000)) * time.Millisecond
	}
	return o
}

func (o *order) post(b *bed) {
	ctx := b.t.Context()
	if o.leaves > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.leaves)
		defer cancel()
	}
	o.start = time.Now()
	o.got = b.post(ctx, o.want.path, o.body, "X-Test", o.id, HeaderTimeout, strconv.FormatInt(o.deadline.Milliseconds(), 10))
}

func (o *order) end() time.Time { return o.start.Add(o.got.took) }

// unrulyLeg is an exchange with who saw it.
type unrulyLeg struct {
	exchange
	u     *unruly
	abort time.Time // when it was told to forget it; zero: never
}

func legsOf(all []*unruly, o *order) []unrulyLeg {
	var out []unrulyLeg
	for _, u := range all {
		u.mu.Lock()
		for _, e := range u.seen {
			if e.req == o.id {
				out = append(out, unrulyLeg{*e, u, u.aborts[e.rid+" "+e.room]})
			}
		}
		u.mu.Unlock()
	}
	return out
}

// check holds the client's side against the promise.
func (o *order) check(legs []unrulyLeg) (how string, err error) {
	left := o.leaves > 0 && errors.Is(o.got.err, context.DeadlineExceeded)
	if limit := o.deadline + 500*time.Millisecond; o.got.took > limit {
		return "late", fmt.Errorf("it took longer than its deadline and half a second")
	}
	if left {
		return "left", nil
	}
	var e wireError
	switch {
	case o.got.status == 0:
		return "lost", fmt.Errorf("no answer: %w", o.got.err)
	case o.got.status != http.StatusOK:
		if json.Unmarshal([]byte(o.got.body), &e) != nil || e.Error.Message == "" || e.Error.Cause == "" || e.Error.Phase == "" || e.Error.Side == "" {
			return "refused", fmt.Errorf("an error that does not say what it is")
		}
		for _, l := range legs {
			if !soundFaults[l.fault] || o.got.took >= o.deadline || len(legs) == 0 {
				return "refused", nil
			}
		}
		if len(legs) > 0 {
			return "refused", fmt.Errorf("refused although nothing was wrong")
		}
		return "refused", nil
	case o.want.stream:
		return o.checkStream()
	default:
		return "answered", o.checkWhole()
	}
}

// reply is what counts of an answer or of an event.
type reply struct {
	Error   json.RawMessage `json:"error"`
	Choices []struct {
		Index   int
		Text    string
		Delta   struct{ Content string }
		Message struct{ Content string }
		Finish  *string `json:"finish_reason"`
	}
	Index int
	Text  string
	Meta  struct {
		Finish *struct{ Type string } `json:"finish_reason"`
	} `json:"meta_info"`
}

// part is a piece of one choice.
type part struct {
	choice       int
	text, finish string
}

func parts(generate bool, r *reply) []part {
	var out []part
	for _, c := range r.Choices {
		p := part{c.Index, c.Text + c.Delta.Content + c.Message.Content, ""}
		if c.Finish != nil {
			p.finish = *c.Finish
		}
		out = append(out, p)
	}
	if generate {
		p := part{r.Index, r.Text, ""}
		if r.Meta.Finish != nil {
			p.finish = r.Meta.Finish.Type
		}
		out = append(out, p)
	}
	return out
}

func (o *order) checkStream() (string, error) {
	if ct := o.got.header.Get("Content-Type"); !strings.HasPrefix(ct, "text/event-stream") {
		return "answered", fmt.Errorf("a stream was asked for, and %q came", ct)
	}
	texts, finishes, failed, ended := map[int]string{}, map[int]int{}, 0, 0
	for events := openai.NewEventReader(strings.NewReader(o.got.body), 1<<20); ; {
		data, err := events.Next()
		if err == io.EOF {
			break
		}
		switch {
		case err != nil:
			return "broken off", fmt.Errorf("the client cannot read the stream: %w", err)
		case failed+ended > 0:
			return "broken off", fmt.Errorf("an event after the last")
		case string(data) == openai.DoneData:
			ended++
			continue
		}
		var r reply
		if err := json.Unmarshal(data, &r); err != nil {
			return "broken off", fmt.Errorf("an event is not JSON: %w: %q", err, data)
		}
		if len(r.Error) > 0 {
			failed++
			continue
		}
		for _, p := range parts(o.want.path == "/generate", &r) {
			if texts[p.choice] += p.text; p.finish != "" {
				finishes[p.choice]++
			}
			if finishes[p.choice] > 1 || p.finish != "" && p.finish != "stop" {
				return "broken off", fmt.Errorf("choice %d ended %d times, now with %q", p.choice, finishes[p.choice], p.finish)
			}
		}
	}
	for c, n := range finishes {
		if n != 1 || texts[c] != textOf(c) {
			return "broken off", fmt.Errorf("choice %d has %d finishes and text %q", c, n, texts[c])
		}
	}
	if failed == 1 {
		if !errors.Is(o.got.err, io.ErrUnexpectedEOF) || len(finishes) == o.want.choices {
			return "broken off", fmt.Errorf("an error event, %d finishes of %d, and end %w", len(finishes), o.want.choices, o.got.err)
		}
		return "broken off", nil
	}
	if o.got.err != nil || len(finishes) != o.want.choices {
		return "answered", fmt.Errorf("%d of %d choices ended, and the stream with %w", len(finishes), o.want.choices, o.got.err)
	}
	return "answered", nil
}

func (o *order) checkWhole() error {
	body := bytes.TrimSpace([]byte(o.got.body))
	var list []reply
	if o.want.list {
		if err := json.Unmarshal(body, &list); err != nil {
			return fmt.Errorf("not a list: %w", err)
		}
	} else {
		list = make([]reply, 1)
		if err := json.Unmarshal(body, &list[0]); err != nil {
			return err
		}
	}
	n := 0
	for i := range list {
		for _, p := range parts(o.want.path == "/generate", &list[i]) {
			if o.want.path == "/generate" {
				p.choice = i
			}
			if n++; p.text != textOf(p.choice) || p.finish != "stop" && p.finish != "length" {
				return fmt.Errorf("choice %d ends with %q and is %q", p.choice, p.finish, p.text)
			}
		}
	}
	if o.got.err != nil || n != o.want.choices {
		return fmt.Errorf("%d of %d choices, end %w", n, o.want.choices, o.got.err)
	}
	return nil
}

// released checks that a second after the request's end nobody works for it, and that who was left in the middle was told.
func released(o *order, legs []unrulyLeg) error {
	limit := o.end().Add(time.Second)
	for _, l := range legs {
		switch {
		case l.gone.IsZero() || l.gone.After(limit):
			return fmt.Errorf("%s still has it a second after its end", l.u.addr)
		case slices.Contains([]Kind{KindVLLM, KindPlain}, l.u.kind):
			if !l.abort.IsZero() {
				return fmt.Errorf("%s has no /abort_request", l.u.addr)
			}
		case l.released && !l.ended && (l.abort.IsZero() || l.abort.After(limit)):
			return fmt.Errorf("%s was not told within a second", l.u.addr)
		}
	}
	return nil
}
