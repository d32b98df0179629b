package grants

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

func newBook(s transfer.Sink, h Hooks[conn, own]) *Book[conn, own] {
	if h.Dismiss == nil {
		h.Dismiss = func(conn) {}
	}
	return New(Config{Kind: "test", Size: size, Conns: 2, Sink: s}, h)
}

// TestSessionPhases: every way through a session's life, and what is let in and heard at each station.
func TestSessionPhases(t *testing.T) {
	type life struct {
		*Book[conn, own]
		sess *Session[conn, own]
	}
	openIt := func(l *life) { _ = l.OpenSession(1) }
	join := func(l *life) { l.sess, _ = l.Join(7, 1) }
	leave := func(l *life) { l.Leave(7, l.sess, true) }
	lose := func(l *life) { l.Leave(7, l.sess, false) }
	end := func(l *life) { l.CloseSession(1) }
	for name, c := range map[string]struct {
		way    []func(*life)
		opens  bool // a second OpenSession is no error
		in     bool // Join and Allow are let in
		fenced int
	}{
		"none":                    {nil, true, false, 0},
		"open":                    {[]func(*life){openIt}, false, true, 0},
		"joined":                  {[]func(*life){openIt, join}, false, true, 0},
		"closed without a writer": {[]func(*life){openIt, end}, true, false, 1},
		"closed, writer there":    {[]func(*life){openIt, join, end}, true, false, 0},
		"closed, then gone":       {[]func(*life){openIt, join, end, leave}, true, false, 1},
		"gone":                    {[]func(*life){openIt, join, leave}, false, false, 1},
		"gone, then closed":       {[]func(*life){openIt, join, leave, end, end}, true, false, 1},
		"lost":                    {[]func(*life){openIt, join, lose}, false, false, 0},
		"lost, then closed":       {[]func(*life){openIt, join, lose, end}, true, false, 0},
		"closed, then lost":       {[]func(*life){openIt, join, end, lose}, true, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				heard := newTold()
				l := &life{Book: newBook(heard, Hooks[conn, own]{})}
				for _, act := range c.way {
					act(l)
					synctest.Wait() // what CloseSession has left
				}
				s, jerr := l.Join(8, 1)
				aerr := l.Allow(grantOf(1, 1))
				if (jerr == nil) != c.in || (aerr == nil) != c.in || (s != nil) != c.in {
					t.Errorf("join %v, allow %v; let in should be %v", jerr, aerr, c.in)
				}
				if !c.in && (!errors.Is(jerr, transfer.ErrSession) || !errors.Is(aerr, transfer.ErrSession)) {
					t.Errorf("join %v, allow %v, want ErrSession", jerr, aerr)
				}
				if len(heard.fenced) != c.fenced {
					t.Errorf("fenced %d times, want %d", len(heard.fenced), c.fenced)
				}
				if err := l.OpenSession(1); (err == nil) != c.opens {
					t.Errorf("open again: %v", err)
				}
			})
		})
	}
}

// TestAllowRefuses names what is wrong, and shows the grant to nobody.
func TestAllowRefuses(t *testing.T) {
	var shown atomic.Int32
	b := newBook(newTold(), Hooks[conn, own]{Allow: func(g *Grant[conn, own], _ map[conn]struct{}) error {
		shown.Add(1)
		if g.ID == 9 {
			return transfer.ErrBusy
		}
		if want := []transfer.Span{{Off: 0, Len: 8}, {Off: 64, Len: 64}}; !slices.Equal(g.Spans, want) {
			t.Errorf("spans %v, want them sorted: %v", g.Spans, want)
		}
		return nil
	}})
	if err := errors.Join(b.OpenSession(1), b.Allow(grantOf(1, 1))); err != nil {
		t.Fatal(err)
	}
	beyond := grantOf(2, 1)
	beyond.Spans = []transfer.Span{{Off: size - 1, Len: 2}}
	for _, c := range []struct {
		g    transfer.Grant
		want error
	}{
		{grantOf(1, 1), transfer.ErrGrant}, {grantOf(0, 1), transfer.ErrGrant}, {grantOf(2, 2), transfer.ErrSession},
		{beyond, transfer.ErrBounds}, {grantOf(9, 1), transfer.ErrBusy},
	} {
		if err := b.Allow(c.g); !errors.Is(err, c.want) {
			t.Errorf("allow %d of %d: %v, want %v", c.g.ID, c.g.Session, err, c.want)
		}
	}
	if n := b.Counts(); shown.Load() != 2 || n.Grants != 1 {
		t.Errorf("shown %d, holds %+v", shown.Load(), n)
	}
	if err := b.OpenSession(0); !errors.Is(err, transfer.ErrSession) {
		t.Errorf("session 0: %v", err)
	}
}

// TestRevokeWaitsForTheFence: while the fence of a grant is under way, be it of its session's end or of another
// Revoke, Revoke does not say that it is fenced.
func TestRevokeWaitsForTheFence(t *testing.T) {
	for name, begin := range map[string]func(*Book[conn, own]){
		"close session": func(b *Book[conn, own]) { b.CloseSession(1) },
		"revoke":        func(b *Book[conn, own]) { b.Go(func() { b.Revoke(5) }) },
		"last leaves": func(b *Book[conn, own]) {
			s, err := b.Join(1, 1)
			if err != nil {
				t.Fatal(err)
			}
			b.Go(func() { b.Leave(1, s, true) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				heard, stored := newTold(), make(chan struct{})
				b := newBook(heard, Hooks[conn, own]{Fence: func(*Grant[conn, own]) { <-stored }})
				if err := errors.Join(b.OpenSession(1), b.Allow(grantOf(5, 1))); err != nil {
					t.Fatal(err)
				}
				begin(b)
				synctest.Wait()
				answer := make(chan bool, 1)
				b.Go(func() { answer <- b.Revoke(5) })
				synctest.Wait()
				if len(answer) != 0 {
					t.Error("revoked although a store may be under way")
				}
				if len(heard.fenced) != 0 {
					t.Error("fenced although a store may be under way")
				}
				if err := b.Allow(grantOf(5, 1)); err == nil {
					t.Error("the id is given again")
				}
				close(stored)
				if !<-answer {
					t.Error("not fenced")
				}
				if err := b.Close(0, nil, nil); err != nil {
					t.Error(err)
				}
				if n := b.Counts(); n != (Counts{}) || !slices.Equal(heard.fenced, []transfer.SessionID{1}) {
					t.Errorf("left %+v, fenced %v", n, heard.fenced)
				}
			})
		})
	}
}

// TestFencedWaitsForTheFence of a grant that is being revoked when its session ends.
func TestFencedWaitsForTheFence(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			heard, stored := newTold(), make(chan struct{})
			b := newBook(heard, Hooks[conn, own]{Fence: func(*Grant[conn, own]) { <-stored }})
			if err := errors.Join(b.OpenSession(1), b.Allow(grantOf(5, 1))); err != nil {
				t.Fatal(err)
			}
			end := func() { b.CloseSession(1) }
			if leaves {
				s, err := b.Join(1, 1)
				if err != nil {
					t.Fatal(err)
				}
				end = func() { b.Leave(1, s, true) }
			}
			b.Go(func() { b.Revoke(5) })
			synctest.Wait()
			b.Go(end)
			synctest.Wait()
			if len(heard.fenced) != 0 {
				t.Errorf("leaves %v: fenced although a store may be under way", leaves)
			}
			close(stored)
			if err := b.Close(0, nil, nil); err != nil {
				t.Error(err)
			}
			if n := b.Counts(); n != (Counts{}) || !slices.Equal(heard.fenced, []transfer.SessionID{1}) {
				t.Errorf("left %+v, fenced %v", n, heard.fenced)
			}
		})
	}
}

// TestExitRevoked: only a writer that Seal has found, and that has left by its own word and by quiet, is counted out.
func TestExitRevoked(t *testing.T) {
	heard := newTold()
	b := newBook(heard, Hooks[conn, own]{Seal: func(*Grant[conn, own]) []conn { return []conn{1} }})
	quiet := func(ok bool) func(*Grant[conn, own]) bool { return func(*Grant[conn, own]) bool { return ok } }
	if err := errors.Join(b.OpenSession(1), b.Allow(grantOf(5, 1))); err != nil {
		t.Fatal(err)
	}
	for c := range 2 {
		if _, err := b.Join(c, 1); err != nil {
			t.Fatal(err)
		}
	}
	if b.ExitRevoked(1, 5, quiet(true)) {
		t.Error("left a grant that is live")
	}
	if b.Revoke(5) {
		t.Error("fenced with a writer inside")
	}
	if b.ExitRevoked(0, 5, quiet(true)) || b.ExitRevoked(1, 5, quiet(false)) || len(heard.revoked) != 0 {
		t.Error("a writer that is not inside, or still is, has left")
	}
	if !b.ExitRevoked(1, 5, quiet(true)) || !slices.Equal(heard.revoked, []transfer.GrantID{5}) {
		t.Errorf("revoked %v", heard.revoked)
	}
	if b.ExitRevoked(1, 5, quiet(true)) || !b.Revoke(5) {
		t.Error("a drained grant is known")
	}
}

// TestLostConnectionTakesTheOthersAlong: the session is over with it, so the others are told to go; the grant that one of them is
// inside is drained when it has, and the one of the lost writer never.
func TestLostConnectionTakesTheOthersAlong(t *testing.T) {
	heard := newTold()
	b := newBook(heard, Hooks[conn, own]{Dismiss: heard.dismiss})
	if err := errors.Join(b.OpenSession(1), b.Allow(grantOf(5, 1)), b.Allow(grantOf(6, 1))); err != nil {
		t.Fatal(err)
	}
	var s *Session[conn, own]
	for c, id := range []transfer.GrantID{5, 6} {
		var err error
		if s, err = b.Join(c, 1); err != nil {
			t.Fatal(err)
		}
		b.Enter(c, b.Live(s, id))
	}
	b.Leave(0, s, false)
	if !slices.Equal(heard.dismissed, []conn{1}) {
		t.Errorf("dismissed %v", heard.dismissed)
	}
	if b.Revoke(5) || b.Revoke(6) {
		t.Error("fenced with a writer inside")
	}
	b.Leave(1, s, true)
	if !slices.Equal(heard.revoked, []transfer.GrantID{6}) || len(heard.fenced) != 0 || b.Revoke(5) || !b.Revoke(6) {
		t.Errorf("revoked %v, fenced %v", heard.revoked, heard.fenced)
	}
}

// TestCloseGivesUpInTheEnd: a writer that does not go is broken after grace, and what can not be fenced is named.
func TestCloseGivesUpInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		heard, broken := newTold(), make(chan conn, 2)
		b := newBook(heard, Hooks[conn, own]{Dismiss: heard.dismiss, Break: func(c conn) { broken <- c }})
		for id := range transfer.SessionID(3) {
			if err := b.OpenSession(id + 1); err != nil {
				t.Fatal(err)
			}
		}
		s, err := b.Join(1, 2)
		if err != nil {
			t.Fatal(err)
		}
		b.Go(func() { b.Leave(<-broken, s, false) })
		begin := time.Now()
		var calls []string
		second := make(chan error, 1)
		boom := errors.New("boom")
		err = b.Close(time.Minute, func() error {
			calls = append(calls, "door")
			go func() { second <- b.Close(time.Minute, func() error { return boom }, nil) }()
			return nil
		}, func() error { calls = append(calls, "last"); return boom })
		var left *transfer.UnfencedError
		if !errors.As(err, &left) || !slices.Equal(left.Sessions, []transfer.SessionID{2}) || !errors.Is(err, boom) || left.Kind != "test" {
			t.Errorf("close: %v", err)
		}
		if err := <-second; err != nil {
			t.Errorf("second close: %v", err)
		}
		if d := time.Since(begin); d != time.Minute || !slices.Equal(calls, []string{"door", "last"}) {
			t.Errorf("took %v, called %v", d, calls)
		}
		slices.Sort(heard.fenced)
		if !slices.Equal(heard.fenced, []transfer.SessionID{1, 3}) || !slices.Equal(heard.dismissed, []conn{1}) {
			t.Errorf("fenced %v, dismissed %v", heard.fenced, heard.dismissed)
		}
		if _, err := b.Join(4, 3); !errors.Is(err, transfer.ErrClosed) || !errors.Is(b.OpenSession(9), transfer.ErrClosed) || !errors.Is(b.Allow(grantOf(1, 1)), transfer.ErrClosed) {
			t.Errorf("lets in after Close: %v", err)
		}
	})
}

// TestStress: writers that enter and leave, revokes, ends of connections and of sessions, all at once. When Revoke
// says fenced, Revoked or Fenced is heard, no writer is inside; and each session is fenced once.
func TestStress(t *testing.T) {
	const sessions, each = 40, 12
	var inside [sessions + 1][each + 1]atomic.Int32
	heard := newTold()
	b := newBook(heard, publishing(Hooks[conn, own]{}))
	quiet := func(s transfer.SessionID, k int) {
		if n := inside[s][k].Load(); n != 0 {
			t.Errorf("session %d, grant %d: %d writers inside after the fence", s, k, n)
		}
	}
	var all sync.WaitGroup
	for s := transfer.SessionID(1); s <= sessions; s++ {
		id := func(k int) transfer.GrantID { return transfer.GrantID(int(s)*100 + k) }
		if err := b.OpenSession(s); err != nil {
			t.Fatal(err)
		}
		var sess *Session[conn, own]
		for c := range 2 { // both, before the first may leave
			var err error
			if sess, err = b.Join(int(s)*10+c, s); err != nil {
				t.Fatal(err)
			}
		}
		for c := range 2 {
			all.Go(func() {
				for try := range 60 {
					k := 1 + try%each
					if g := b.Live(sess, id(k)); g != nil && b.Enter(int(s)*10+c, g) {
						inside[s][k].Add(1)
						inside[s][k].Add(-1)
						b.Exit(int(s)*10+c, g)
					}
				}
				b.Leave(int(s)*10+c, sess, true)
			})
		}
		all.Go(func() {
			for k := 1; k <= each; k++ {
				if b.Allow(grantOf(id(k), s)) != nil {
					break // the session has ended
				}
				if k%3 > 0 && b.Revoke(id(k)) {
					quiet(s, k)
				} else if k%3 > 0 {
					heard.until(func(h *told) bool { return slices.Contains(h.revoked, id(k)) || slices.Contains(h.fenced, s) })
					quiet(s, k)
				}
			}
			b.CloseSession(s)
		})
	}
	all.Wait()
	if err := b.Close(0, nil, nil); err != nil {
		t.Error(err)
	}
	for s := transfer.SessionID(1); s <= sessions; s++ {
		n := 0
		for _, f := range heard.fenced {
			if f == s {
				n++
			}
		}
		if n != 1 {
			t.Errorf("session %d fenced %d times", s, n)
		}
	}
	if n := b.Counts(); n != (Counts{}) {
		t.Errorf("left %+v", n)
	}
}
