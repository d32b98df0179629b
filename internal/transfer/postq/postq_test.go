package postq

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/transfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errTest = errors.New("test verdict")

// outcome records the verdicts of writes by name.
type outcome struct {
	mu  sync.Mutex
	got map[string][]error
}

func (o *outcome) done(name string) func(error) {
	return func(err error) {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.got == nil {
			o.got = make(map[string][]error)
		}
		o.got[name] = append(o.got[name], err)
	}
}

func (o *outcome) want(t *testing.T, name string, want error) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if v := o.got[name]; len(v) != 1 || !errors.Is(v[0], want) && v[0] != want {
		t.Fatalf("write %s settled with %v, want once with %v", name, v, want)
	}
}

func (o *outcome) unsettled(t *testing.T, name string) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if v := o.got[name]; len(v) != 0 {
		t.Fatalf("write %s settled too early: %v", name, v)
	}
}

func (o *outcome) write(g transfer.GrantID, name string, n int) transfer.Write {
	return transfer.Write{Grant: g, Segments: []transfer.Segment{{Src: make([]byte, n)}}, Notify: []byte(name), Done: o.done(name)}
}

func post(t *testing.T, q *Queue, w transfer.Write) {
	t.Helper()
	if err := q.Post(w); err != nil {
		t.Fatalf("post %s: %v", w.Notify, err)
	}
}

func next(t *testing.T, q *Queue) *Item {
	t.Helper()
	it, ok := q.Next()
	if !ok {
		t.Fatal("queue has failed")
	}
	return it
}

func TestGrantsTakeTurnsAndKeepTheirOrder(t *testing.T) {
	q := New(Config{Limit: 16, Open: 4, Segments: 8})
	var o outcome
	for _, n := range []string{"a1", "a2"} {
		post(t, q, o.write(1, n, 3))
	}
	post(t, q, o.write(2, "b1", 2))
	post(t, q, o.write(3, "c1", 1))
	var order []string
	for range 9 { // one byte a piece: 3+3+2+1
		it := next(t, q)
		it.Sent++
		order = append(order, string(it.Notify))
		if err := q.Return(it, it.Sent == it.Total); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"a1", "b1", "c1", "a1", "b1", "a1", "a2", "a2", "a2"}
	if !slices.Equal(order, want) {
		t.Fatalf("pieces went out as %v, want %v", order, want)
	}
	for seq := uint64(1); seq <= 4; seq++ {
		if !q.Settle(seq, nil) {
			t.Fatalf("settle %d refused", seq)
		}
	}
	for _, n := range []string{"a1", "a2", "b1", "c1"} {
		o.want(t, n, nil)
	}
	if q.count != 0 || q.open != 0 || len(q.lanes) != 0 || len(q.flight) != 0 || len(q.ring) != 0 {
		t.Fatalf("queue is not empty: %+v", q)
	}
}

// TestAlone: what waits under the item's own grant is nobody else's.
func TestAlone(t *testing.T) {
	q := New(Config{Limit: 16, Open: 4, Segments: 8})
	var o outcome
	post(t, q, o.write(1, "a1", 3))
	post(t, q, o.write(1, "a2", 3))
	it := next(t, q)
	if !q.Alone() {
		t.Error("a grant's next write counts as somebody else's")
	}
	post(t, q, o.write(2, "b1", 2))
	if q.Alone() {
		t.Error("another grant's write waits")
	}
	it.Sent = it.Total
	if err := q.Return(it, true); err != nil {
		t.Fatal(err)
	}
	q.Fail(errTest)
	q.Drain(errTest)
}

func TestOpenLimitFinishesBegunWritesFirst(t *testing.T) {
	q := New(Config{Limit: 16, Open: 2, Segments: 8})
	var o outcome
	for g := range 4 {
		post(t, q, o.write(transfer.GrantID(g+1), fmt.Sprint(g+1), 2))
	}
	var order []string
	for range 8 {
		it := next(t, q)
		if q.open > 2 {
			t.Fatalf("%d writes open, limit 2", q.open)
		}
		it.Sent++
		order = append(order, string(it.Notify))
		_ = q.Return(it, it.Sent == it.Total)
	}
	if want := []string{"1", "2", "1", "3", "2", "4", "3", "4"}; !slices.Equal(order, want) {
		t.Fatalf("pieces went out as %v, want %v", order, want)
	}
}

func TestLimitsAreRefusedAndLeaveTheWriteWithTheCaller(t *testing.T) {
	q := New(Config{Limit: 2, Open: 1, Segments: 2})
	var o outcome
	big := transfer.Write{Segments: make([]transfer.Segment, 3), Done: o.done("big")}
	if err := q.Post(big); !errors.Is(err, transfer.ErrTooLarge) {
		t.Fatalf("3 segments: %v", err)
	}
	long := transfer.Write{Notify: make([]byte, transfer.MaxNotify+1), Done: o.done("long")}
	if err := q.Post(long); !errors.Is(err, transfer.ErrTooLarge) {
		t.Fatalf("long notification: %v", err)
	}
	post(t, q, o.write(1, "a", 1))
	post(t, q, o.write(1, "b", 1))
	if err := q.Post(o.write(1, "c", 1)); !errors.Is(err, transfer.ErrBusy) {
		t.Fatalf("full queue: %v", err)
	}
	it := next(t, q)
	_ = q.Return(it, true)
	// A Done may post again: its own place is free by then.
	reposted := false
	q.flight[1].Done = func(error) {
		reposted = true
		post(t, q, o.write(1, "d", 1))
	}
	if !q.Settle(1, nil) || !reposted {
		t.Fatal("not settled")
	}
	for _, n := range []string{"big", "long", "c"} {
		o.unsettled(t, n)
	}
}

func TestAnswerWaitsForTheSender(t *testing.T) {
	q := New(Config{Limit: 4, Open: 2, Segments: 2})
	var o outcome
	post(t, q, o.write(1, "last", 2))
	it := next(t, q)
	if !q.Settle(it.Seq, nil) {
		t.Fatal("answer to the piece being sent refused")
	}
	o.unsettled(t, "last") // its segments are being read
	if err := q.Return(it, true); err != nil {
		t.Fatal(err)
	}
	o.want(t, "last", nil)

	post(t, q, o.write(1, "refused", 2))
	it = next(t, q)
	_ = q.Return(it, false)
	if !q.Settle(it.Seq, errTest) {
		t.Fatal("refusal before the end not accepted")
	}
	o.unsettled(t, "refused")
	it = next(t, q)
	if err := q.Answered(it); !errors.Is(err, errTest) {
		t.Fatalf("sender sees %v", err)
	}
	q.Refuse(it, errTest)
	o.want(t, "refused", errTest)
}

func TestWrongAnswersAreNoticed(t *testing.T) {
	q := New(Config{Limit: 4, Open: 2, Segments: 2})
	var o outcome
	if q.Settle(1, nil) {
		t.Fatal("unknown write settled")
	}
	post(t, q, o.write(1, "early", 3))
	it := next(t, q)
	if !q.Settle(it.Seq, nil) {
		t.Fatal("cannot know yet whether this is the last piece")
	}
	if q.Settle(it.Seq, nil) {
		t.Fatal("settled twice")
	}
	if err := q.Return(it, false); !errors.Is(err, ErrEarly) {
		t.Fatalf("early completion: %v", err)
	}
	q.Fail(transfer.ErrPeerLost)
	q.Drain(transfer.ErrPeerLost)
	o.want(t, "early", transfer.ErrPeerLost)

	q = New(Config{Limit: 4, Open: 2, Segments: 2})
	post(t, q, o.write(1, "between", 3))
	it = next(t, q)
	_ = q.Return(it, false)
	if q.Settle(it.Seq, nil) {
		t.Fatal("completion between two pieces accepted")
	}
}

func TestFailSettlesEverythingOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(Config{Limit: 8, Open: 2, Segments: 2})
		var o outcome
		for i, n := range []string{"unacked", "half", "queued", "behind"} {
			post(t, q, o.write(transfer.GrantID(min(i, 2)+1), n, 2))
		}
		_ = q.Return(next(t, q), true)
		_ = q.Return(next(t, q), false)
		finished := make(chan struct{})
		go func() { // the sender
			defer close(finished)
			for {
				it, ok := q.Next()
				if !ok {
					q.Drain(errTest)
					return
				}
				if string(it.Notify) == "behind" {
					_ = q.Return(it, false)
					q.Fail(errTest) // as if its connection broke here
					continue
				}
				_ = q.Return(it, true)
			}
		}()
		<-finished
		for _, n := range []string{"unacked", "half", "queued", "behind"} {
			o.want(t, n, errTest)
		}
		if err := q.Post(o.write(1, "late", 1)); !errors.Is(err, errTest) {
			t.Fatalf("post after the end: %v", err)
		}
		q.Fail(transfer.ErrClosed)
		if err := q.Post(o.write(1, "later", 1)); !errors.Is(err, errTest) {
			t.Fatalf("first error was replaced: %v", err)
		}
	})
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	q := New(Config{Limit: 64, Open: 4, Segments: 2})
	w := transfer.Write{Segments: make([]transfer.Segment, 1), Done: func(error) {}}
	seq := uint64(0)
	round := func() {
		for g := range 8 {
			w.Grant = transfer.GrantID(g + 1)
			if q.Post(w) != nil || q.Post(w) != nil {
				panic("post")
			}
		}
		for range 16 {
			it, _ := q.Next()
			_ = q.Return(it, true)
			seq++
			if !q.Settle(seq, nil) {
				panic("settle")
			}
		}
	}
	round()
	if n := testing.AllocsPerRun(100, round); n > 0 {
		t.Fatalf("%v allocations a round", n)
	}
}

// TestPosterSendsWhenNothingElseIs: a small write is handed to its poster only while no other
// is out or waits, and the sender waits for its return.
func TestPosterSendsWhenNothingElseIs(t *testing.T) {
	q := New(Config{Limit: 16, Open: 4, Segments: 8})
	var o outcome
	mine, err := q.PostNow(o.write(1, "a", 10), 10)
	if err != nil || mine == nil || string(mine.Notify) != "a" || mine.Seq != 1 {
		t.Fatalf("%+v, %v", mine, err)
	}
	if other, err := q.PostNow(o.write(2, "b", 1), 10); err != nil || other != nil {
		t.Fatalf("two items out: %+v, %v", other, err)
	}
	got := make(chan *Item)
	go func() {
		it, _ := q.Next()
		got <- it
	}()
	q.Fail(nil) // no error: only wakes the sender, who must wait on
	select {
	case it := <-got:
		t.Fatalf("sender got %q while an item was out", it.Notify)
	default:
	}
	if err := q.Return(mine, true); err != nil {
		t.Fatal(err)
	}
	it := <-got
	if string(it.Notify) != "b" {
		t.Fatalf("sender got %q", it.Notify)
	}
	_ = q.Return(it, true)
	if big, err := q.PostNow(o.write(1, "big", 11), 10); err != nil || big != nil {
		t.Fatalf("handed out 11 bytes, limit 10: %v, %v", big, err)
	}
	_ = q.Return(next(t, q), true)
	for seq := uint64(1); seq <= 3; seq++ {
		q.Settle(seq, nil)
	}
	for _, n := range []string{"a", "b", "big"} {
		o.want(t, n, nil)
	}
}

// TestHandedItemComesBackAsItIs: also after the queue has failed, so that it is settled by Drain.
func TestHandedItemComesBackAsItIs(t *testing.T) {
	for _, fail := range []bool{false, true} {
		q := New(Config{Limit: 16, Open: 4, Segments: 8})
		var o outcome
		mine, _ := q.PostNow(o.write(1, "a", 4), 10)
		mine.Sent = 3
		if fail {
			q.Fail(transfer.ErrPeerLost)
		}
		q.Hand(mine)
		if it := next(t, q); it != mine || it.Sent != 3 {
			t.Fatalf("got %+v", it)
		}
		_ = q.Return(mine, false)
		if fail {
			if _, ok := q.Next(); ok {
				t.Fatal("a failed queue goes on")
			}
			q.Drain(transfer.ErrPeerLost)
			o.want(t, "a", transfer.ErrPeerLost)
		}
	}
}

// TestSmallWritesGoFirstButNotForEver: of long writes' pieces at most every ninth waits for
// small ones, and small ones wait for one long piece at most.
func TestSmallWritesGoFirstButNotForEver(t *testing.T) {
	q := New(Config{Limit: 64, Open: 64, Segments: 8})
	var o outcome
	const long = 8 << 20
	for g := range 3 {
		post(t, q, o.write(transfer.GrantID(g+1), "long", long))
	}
	for g := range 20 {
		post(t, q, o.write(transfer.GrantID(g+10), "small", smallBytes))
	}
	var order string
	for range 26 {
		it := next(t, q)
		order += string(it.Notify[:1])
		it.Sent = min(it.Sent+1<<20, it.Total)
		if err := q.Return(it, it.Sent == it.Total); err != nil {
			t.Fatal(err)
		}
	}
	if want := "ssssssssl" + "ssssssssl" + "ssss" + "llll"; order != want {
		t.Errorf("order %s, want %s", order, want)
	}
}

// A grant is held from Post to Settle, sent or not; the queue waits when all is sent and not all settled.
func TestHoldsAndWaitsUntilSettled(t *testing.T) {
	q := New(Config{Limit: 16, Open: 4, Segments: 8})
	var o outcome
	is := func(when string, one, two, waits bool) {
		t.Helper()
		if q.Holds(1) != one || q.Holds(2) != two || q.Waits() != waits {
			t.Fatalf("%s: holds %v and %v, waits %v", when, q.Holds(1), q.Holds(2), q.Waits())
		}
	}
	is("empty", false, false, false)
	post(t, q, o.write(1, "a", 1))
	post(t, q, o.write(1, "b", 1))
	is("posted", true, false, false)
	a := next(t, q)
	is("out", true, false, false)
	_ = q.Return(a, true)
	is("one is sent", true, false, false)
	b := next(t, q)
	_ = q.Return(b, true)
	is("both are sent", true, false, true)
	q.Settle(1, nil)
	is("one is settled", true, false, true)
	post(t, q, o.write(2, "c", 1))
	is("a third is posted", true, true, false)
	q.Settle(2, nil)
	is("both are settled", false, true, false)
	q.Refuse(next(t, q), errTest)
	is("the third is refused", false, false, false)
	post(t, q, o.write(1, "d", 1))
	q.Fail(errTest)
	q.Drain(errTest)
	is("drained", false, false, false)
}

// TestSmallWritesGoBeside: with Config.Beside a poster gets its small write while another grant's is out, but not past a write
// of its own grant, not more than Open of them, and the end of the queue waits for all that are out.
func TestSmallWritesGoBeside(t *testing.T) {
	q := New(Config{Limit: 16, Open: 3, Segments: 8, Beside: true})
	var o outcome
	now := func(g transfer.GrantID, name string, n int) *Item {
		t.Helper()
		it, err := q.PostNow(o.write(g, name, n), 10)
		if err != nil {
			t.Fatalf("post %s: %v", name, err)
		}
		return it
	}
	post(t, q, o.write(1, "long", 100))
	early := now(7, "early", 1)
	if early == nil {
		t.Fatal("a small write waits for the sender to take another grant's")
	}
	long := next(t, q)
	if err := q.Return(early, true); err != nil {
		t.Fatal(err)
	}
	if it := now(1, "behind", 1); it != nil {
		t.Fatal("a small write overtook its own grant's")
	}
	a, b := now(2, "a", 10), now(3, "b", 1)
	if a == nil || b == nil {
		t.Fatalf("not beside: %v, %v", a, b)
	}
	if it := now(4, "c", 1); it != nil {
		t.Fatal("four are begun, Open is 3")
	}
	if it := now(2, "a2", 1); it != nil {
		t.Fatal("two of a grant are out")
	}
	if err := q.Return(a, true); err != nil {
		t.Fatal(err)
	}
	if err := q.Return(b, false); err != nil { // not wholly sent: it is the sender's
		t.Fatal(err)
	}
	if it := now(5, "big", 11); it != nil {
		t.Fatal("handed out 11 bytes, limit 10")
	}
	q.Fail(transfer.ErrPeerLost)
	if _, err := q.PostNow(o.write(6, "late", 1), 10); !errors.Is(err, transfer.ErrPeerLost) {
		t.Fatalf("after the end: %v", err)
	}
	if err := q.Return(long, false); err != nil {
		t.Fatal(err)
	}
	if _, ok := q.Next(); ok {
		t.Fatal("a failed queue goes on")
	}
	q.Drain(transfer.ErrPeerLost)
	for _, n := range []string{"early", "long", "behind", "a", "b", "c", "a2", "big"} {
		o.want(t, n, transfer.ErrPeerLost)
	}
}

// TestEndWaitsForWhatIsBeside: Next says the end when nothing is out, in whatever order.
func TestEndWaitsForWhatIsBeside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(Config{Limit: 16, Open: 3, Segments: 8, Beside: true})
		var o outcome
		post(t, q, o.write(1, "long", 100))
		long := next(t, q)
		small, err := q.PostNow(o.write(2, "small", 1), 10)
		if err != nil || small == nil {
			t.Fatalf("not beside: %v", err)
		}
		q.Fail(transfer.ErrPeerLost)
		_ = q.Return(long, false)
		ended := make(chan bool, 1)
		go func() {
			_, ok := q.Next()
			ended <- !ok
		}()
		synctest.Wait()
		select {
		case <-ended:
			t.Fatal("the end, with an item out")
		default:
		}
		if q.Waits() {
			t.Error("waits for an answer only, with an item out")
		}
		_ = q.Return(small, true)
		if !<-ended {
			t.Fatal("a failed queue goes on")
		}
		q.Drain(transfer.ErrPeerLost)
		o.want(t, "small", transfer.ErrPeerLost)
	})
}

// TestPosterGetsOnlyItsOwn: between two pieces of a long write nobody has the turn; a poster whose small write is not the first of
// its grant then gets nothing, neither the write before it nor another grant's.
func TestPosterGetsOnlyItsOwn(t *testing.T) {
	for _, own := range []bool{true, false} {
		q := New(Config{Limit: 16, Open: 8, Segments: 8, Beside: true})
		var o outcome
		post(t, q, o.write(1, "long", 100))
		long, g := next(t, q), transfer.GrantID(1)
		var beside *Item
		if !own {
			var err error
			if beside, err = q.PostNow(o.write(2, "first", 1), 10); err != nil || beside == nil {
				t.Fatalf("not beside: %v", err)
			}
			g = 2
		}
		if err := q.Return(long, false); err != nil {
			t.Fatal(err)
		}
		if it, err := q.PostNow(o.write(g, "second", 1), 10); err != nil || it != nil {
			t.Fatalf("own %v: got %+v, %v", own, it, err)
		}
		if it := next(t, q); it != long {
			t.Errorf("own %v: the long write's next piece is not the sender's", own)
		}
		if beside != nil {
			_ = q.Return(beside, true)
		}
		_ = q.Return(long, true)
		q.Fail(errTest)
		q.Drain(errTest)
	}
}
