package httpapi

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

// choice is one answer as it grows.
type choice struct {
	index, prompt int
	text          strings.Builder
	tokens        []sched.TokenEvent // kept only if the answer shows them
	count         int                // tokens so far
	before        int                // of count: made by another worker
	last          engine.Token       // -1 before the first
	finish        sched.FinishReason // "" while running
	matched       string             // stop string, if one matched
	started       bool               // the stream has shown something of it
	chars         int                // characters begun by tokens shown with logprobs
}

// job is a submitted request: its streams, its choices, its way to the client.
type job struct {
	*admitted
	s       *server
	w       *response
	shape   shape
	choices []*choice
	ctx     context.Context // ends with the client or at the deadline
	stop    context.CancelFunc
	live    *liveRequest
	source  source

	mu        sync.Mutex // guards the two below against /abort_request
	streams   []sched.Stream
	cancelled *room.Cause
}

// source yields the events of all prompts; io.EOF after the last stream has ended well.
type source interface {
	next() (prompt int, ev sched.Event, err error)
	wait() // after ctx has ended: no goroutine is left
}

// generation is the handler of the three generating endpoints.
func (s *server) generation(kind openai.Kind) handlerFunc {
	return func(w *response, r *http.Request) *openai.Error {
		a, e := s.admit(w, r, kind)
		if e != nil {
			return e
		}
		j := s.newJob(w, r, a)
		defer j.close()
		if e = j.submit(); e == nil {
			e = j.run()
		}
		if e != nil {
			j.cancel(e.Cause)
			w.fail(e) // before close, which waits for the scheduler to let go
		}
		return nil
	}
}

func (s *server) newJob(w *response, r *http.Request, a *admitted) *job {
	// Some clients take long to read; their time is over a little after the request's.
	w.writeBy(a.deadline.Add(10 * time.Second))
	j := &job{admitted: a, s: s, w: w}
	j.ctx, j.stop = context.WithDeadlineCause(r.Context(), a.deadline, j.deadlineCause())
	for p := range a.prompts {
		for range a.req.N {
			c := &choice{index: len(j.choices), prompt: p, last: -1}
			if a.req.Resume != nil {
				c.goOn(a.req.Resume, s.Tokenizer)
			}
			j.choices = append(j.choices, c)
		}
	}
	j.shape = newShape(s, j)
	return j
}

// edgeMargin is how much earlier than the client's deadline the scheduler's is, so
// that its error, which knows more, still arrives in time.
func edgeMargin(left time.Duration) time.Duration { return min(left/20, 200*time.Millisecond) }

// submit registers the request for aborts, then hands every prompt to the scheduler.
func (j *job) submit() *openai.Error {
	rooms := make([]uint64, len(j.req.Bootstrap))
	for i, b := range j.req.Bootstrap {
		rooms[i] = b.Key.Room
	}
	lr, aborted := j.s.live.add(j.ids, rooms, j.cancel)
	if aborted {
		return openai.FromCause(j.s.cause(room.CodeAborted, "aborted by /abort_request before it arrived"))
	}
	j.live = lr
	deadline := j.deadline.Add(-edgeMargin(j.deadline.Sub(j.w.start)))
	for i := range j.prompts {
		st, err := j.s.Scheduler.Submit(j.ctx, j.schedRequest(j.s, i, deadline))
		if err != nil {
			e := openai.FromErr(err)
			return e
		}
		j.mu.Lock()
		j.streams = append(j.streams, st)
		c := j.cancelled
		j.mu.Unlock()
		if c != nil {
			st.Cancel(c)
		}
	}
	if len(j.streams) == 1 {
		j.source = &single{j.ctx, j.streams[0]}
	} else {
		j.source = merge(j.ctx, j.streams)
	}
	return nil
}

// cancel ends every stream of the request with this cause. Any goroutine may call it.
func (j *job) cancel(c *room.Cause) {
	j.mu.Lock()
	if j.cancelled == nil {
		j.cancelled = c
	}
	c = j.cancelled
	streams := j.streams
	j.mu.Unlock()
	for _, st := range streams {
		st.Cancel(c)
	}
}

// close gives everything back; the scheduler holds nothing of the request afterwards.
func (j *job) close() {
	j.stop()
	for _, st := range j.streams {
		st.Close()
	}
	if j.source != nil {
		j.source.wait()
	}
	if j.live != nil {
		j.s.live.remove(j.live)
	}
	if len(j.streams) > 0 {
		j.w.phases = j.streams[0].Phases()
	}
	if j.s.Tracer != nil {
		j.w.ways = j.ways()
	}
	for _, c := range j.choices {
		j.w.completeToks += c.count - c.before
	}
}

// run answers the client. An error has not been told to it yet.
func (j *job) run() *openai.Error {
	if j.req.Stream {
		return j.stream()
	}
	for {
		_, _, err := j.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return openai.FromErr(err)
		}
	}
	body, err := j.shape.whole(j.choices, j.usage())
	if err != nil {
		return openai.FromErr(err)
	}
	return j.w.body(body)
}

// stream answers with server-sent events. The header waits for the first event.
func (j *job) stream() *openai.Error {
	var buf []byte
	for {
		c, ev, err := j.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return openai.FromErr(err)
		}
		role := j.req.Kind == openai.KindChat && !c.started
		chunks, err := j.shape.chunks(c, ev)
		if err != nil {
			return openai.FromErr(err)
		}
		buf = buf[:0]
		for i, data := range chunks {
			// With the event of the text: if the stream breaks between two events, the tokens say what the client has.
			if j.tellTokens && ev.Text != "" && (i == 0 && !role || i == 1 && role) {
				buf = j.appendTokens(buf, ev)
			}
			buf = openai.AppendEvent(buf, data)
		}
		if e := j.send(buf); e != nil {
			return e
		}
	}
	buf = buf[:0]
	last, err := j.shape.usage(j.usage())
	if err != nil {
		return openai.FromErr(err)
	}
	if last != nil {
		buf = openai.AppendEvent(buf, last)
	}
	return j.send(openai.AppendEvent(buf, []byte(openai.DoneData)))
}

// send writes events, and before the first ones the header.
func (j *job) send(events []byte) *openai.Error {
	if len(events) == 0 {
		return nil
	}
	if !j.w.streaming {
		h := j.w.Header()
		h.Set("Content-Type", "text/event-stream; charset=utf-8")
		h.Set("Cache-Control", "no-cache")
		h.Set("X-Accel-Buffering", "no") // nginx would hold events back
		j.setResumeHeaders(h)
		j.w.streaming = true
		j.w.WriteHeader(http.StatusOK)
	}
	_, err := j.w.Write(events)
	if err == nil {
		err = j.w.ctl.Flush()
	}
	if err != nil && !errors.Is(err, http.ErrNotSupported) {
		return openai.FromCause(j.s.cause(room.CodeClientGone, "write to the client: %v", err))
	}
	return nil
}

// next takes the next event into its choice. A choice that the prefill side leaves
// without an end gets one here: the answer proper is the decode side's.
func (j *job) next() (*choice, sched.Event, error) {
	prompt, ev, err := j.source.next()
	if err == io.EOF {
		return j.endLeft()
	}
	if err != nil {
		return nil, ev, j.failure(err)
	}
	if ev.Choice < 0 || ev.Choice >= j.req.N {
		return nil, ev, j.s.cause(room.CodeInternal, "the scheduler answered choice %d of %d", ev.Choice, j.req.N)
	}
	c := j.choices[prompt*j.req.N+ev.Choice]
	if c.finish != "" {
		return nil, ev, j.s.cause(room.CodeInternal, "the scheduler went on with choice %d after its end", c.index)
	}
	c.take(ev, j.shape.keepsTokens())
	return c, ev, nil
}

func (c *choice) take(ev sched.Event, keep bool) {
	c.text.WriteString(ev.Text)
	c.count += len(ev.Tokens)
	if n := len(ev.Tokens); n > 0 {
		c.last = ev.Tokens[n-1].ID
	}
	if keep {
		c.tokens = append(c.tokens, ev.Tokens...)
	}
	c.finish, c.matched = ev.Finish, ev.MatchedStop
}

// endLeft ends the next choice that has no end, or gives io.EOF.
func (j *job) endLeft() (*choice, sched.Event, error) {
	for _, c := range j.choices {
		if c.finish != "" {
			continue
		}
		if j.s.Role != RolePrefill {
			return nil, sched.Event{}, j.s.cause(room.CodeInternal, "the scheduler left choice %d without an end", c.index)
		}
		ev := sched.Event{Choice: c.index % j.req.N, Finish: sched.FinishLength}
		c.take(ev, false)
		return c, ev, nil
	}
	return nil, sched.Event{}, io.EOF
}

// failure names the cause of an error of a stream. The end of our own context is
// either the client's or the deadline's doing.
func (j *job) failure(err error) error {
	if c := (*room.Cause)(nil); errors.As(err, &c) {
		return c
	}
	switch {
	case errors.Is(j.ctx.Err(), context.DeadlineExceeded):
		return j.deadlineCause()
	case j.ctx.Err() != nil:
		c := j.s.cause(room.CodeClientGone, "the client closed its connection")
		c.Key = j.firstKey()
		return c
	default:
		return err
	}
}

func (j *job) deadlineCause() *room.Cause {
	c := j.s.cause(room.CodeDeadline, "the request's deadline passed")
	c.Key = j.firstKey()
	return c
}

func (j *job) firstKey() room.Key {
	if len(j.req.Bootstrap) > 0 {
		return j.req.Bootstrap[0].Key
	}
	return room.Key{}
}

// usage counts each prompt once, however many choices share it.
func (j *job) usage() openai.Usage {
	done := 0
	for _, c := range j.choices {
		done += c.count
	}
	return openai.NewUsage(j.w.promptToks, done)
}

// single is the source of a request with one prompt.
type single struct {
	ctx context.Context
	st  sched.Stream
}

func (s *single) next() (int, sched.Event, error) {
	ev, err := s.st.Next(s.ctx)
	return 0, ev, err
}
func (s *single) wait() {}

// merged is the source of a request with several prompts: one goroutine a stream.
type merged struct {
	ctx   context.Context
	items chan item
	left  int // streams that have not ended; touched by next only
	group sync.WaitGroup
}

type item struct {
	prompt int
	ev     sched.Event
	err    error
}

func merge(ctx context.Context, streams []sched.Stream) *merged {
	m := &merged{ctx: ctx, items: make(chan item), left: len(streams)}
	for i, st := range streams {
		m.group.Go(func() {
			for {
				ev, err := st.Next(ctx)
				select {
				case m.items <- item{i, ev, err}:
				case <-ctx.Done():
					return
				}
				if err != nil {
					return
				}
			}
		})
	}
	return m
}

func (m *merged) next() (int, sched.Event, error) {
	for m.left > 0 {
		select {
		case it := <-m.items:
			if it.err == io.EOF {
				m.left--
				continue
			}
			return it.prompt, it.ev, it.err
		case <-m.ctx.Done():
			return 0, sched.Event{}, m.ctx.Err()
		}
	}
	return 0, sched.Event{}, io.EOF
}

func (m *merged) wait() { m.group.Wait() }
