package wire

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// Proxies are the links where there is no [Switch]: one listener before each port of each process. A
// link is known by the process that listens alone: who dials is not known, so weather from or to
// another process counts for everybody who uses that port.
type Proxies struct {
	mu      sync.Mutex
	rng     *rand.Rand
	weather map[way]Weather
	changed chan struct{} // closed and replaced by Set
	counts  Counts
	closed  bool
	open    []io.Closer
	wg      sync.WaitGroup
}

// NewProxies draws random decisions from seed.
func NewProxies(seed uint64) *Proxies {
	return &Proxies{rng: rand.New(rand.NewPCG(seed, 0x70726f78)), weather: map[way]Weather{}, changed: make(chan struct{})}
}

// Via starts a proxy before addr, where process name listens, and returns its address. peers are the
// processes that may dial it.
func (p *Proxies) Via(name, addr string, peers ...string) (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("wire: proxy before %s: %w", addr, err)
	}
	if !p.keep(l) {
		return "", errors.New("wire: the proxies are closed")
	}
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // closed
			}
			if p.keep(c) {
				p.wg.Go(func() { p.serve(c.(*net.TCPConn), name, addr, peers) })
			}
		}
	})
	return l.Addr().String(), nil
}

// keep has c closed at the end; false, and closed, if that has come.
func (p *Proxies) keep(c io.Closer) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = c.Close()
		return false
	}
	p.open = append(p.open, c)
	return true
}

func (p *Proxies) forget(cs ...io.Closer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	kept := p.open[:0]
	for _, o := range p.open {
		if o != cs[0] && (len(cs) < 2 || o != cs[1]) {
			kept = append(kept, o)
		}
	}
	p.open = kept
}

// serve passes one connection on, both ways.
func (p *Proxies) serve(in *net.TCPConn, name, addr string, peers []string) {
	defer p.forget(in)
	defer in.Close()
	if !p.wait(peers, name) { // a partition lets nobody in
		return
	}
	d, err := net.DialTimeout("tcp", addr, 2*time.Second)
	if err != nil {
		reset(in)
		return
	}
	out := d.(*net.TCPConn)
	if !p.keep(out) {
		return
	}
	defer p.forget(out)
	var both sync.WaitGroup
	both.Go(func() { p.pass(in, out, peers, []string{name}) })
	both.Go(func() { p.pass(out, in, []string{name}, peers) })
	both.Wait()
	_ = out.Close()
}

// reset closes a connection so that its peer gets a reset.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// pass copies from src to dst as the weather between them says.
func (p *Proxies) pass(src, dst *net.TCPConn, from, to []string) {
	buf := make([]byte, 16<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			w, f := p.draw(buf[:n], from, to)
			switch {
			case f.reset:
				reset(src)
				reset(dst)
				return
			case f.corrupt:
				buf[f.at] ^= byte(f.mask)
			}
			if len(f.delays) > 0 && !p.pause(f.delays[0]) {
				return
			}
			if w.Drop >= 1 && !p.waitLists(from, to) {
				return
			}
			if _, err := dst.Write(buf[:n]); err != nil {
				reset(src)
				return
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				_ = dst.CloseWrite()
			} else {
				reset(dst)
			}
			return
		}
	}
}

// current is the worst of all weather between any of from and any of to.
func (p *Proxies) current(from, to []string) (w Weather, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range from {
		for _, b := range to {
			x := p.weather[way{a, b}]
			w.Drop, w.Reorder, w.Corrupt, w.Reset = max(w.Drop, x.Drop), max(w.Reorder, x.Reorder), max(w.Corrupt, x.Corrupt), max(w.Reset, x.Reset)
			w.Delay, w.Jitter = max(w.Delay, x.Delay), max(w.Jitter, x.Jitter)
		}
	}
	return w, p.changed
}

// draw decides about a piece of a stream. What a stream can not do becomes a pause.
func (p *Proxies) draw(piece []byte, from, to []string) (Weather, fate) {
	w, _ := p.current(from, to)
	p.mu.Lock()
	defer p.mu.Unlock()
	hit := func(chance float64) bool { return chance > 0 && p.rng.Float64() < chance }
	var f fate
	if hit(w.Reset) {
		f.reset = true
	} else if hit(w.Corrupt) {
		f.corrupt, f.at, f.mask = true, p.rng.IntN(len(piece)), 1<<p.rng.IntN(8)
	}
	wait := w.Delay
	if w.Jitter > 0 {
		wait += time.Duration(p.rng.Int64N(int64(w.Jitter)))
	}
	if w.Drop < 1 && hit(w.Drop) {
		f.drop = true
		wait += 200 * time.Millisecond
	}
	if hit(w.Reorder) {
		f.reordered = true
		wait += 20 * time.Millisecond
	}
	f.delays = []time.Duration{wait}
	book := func(n *uint64, is bool) {
		if is {
			*n++
		}
	}
	book(&p.counts.Passed, !f.reset)
	book(&p.counts.Dropped, f.drop || w.Drop >= 1)
	book(&p.counts.Corrupted, f.corrupt)
	book(&p.counts.Reset, f.reset)
	book(&p.counts.Reordered, f.reordered)
	book(&p.counts.Delayed, wait > 0)
	return w, f
}

// pause waits; false: the proxies were closed.
func (p *Proxies) pause(d time.Duration) bool {
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		p.mu.Lock()
		changed, closed := p.changed, p.closed
		p.mu.Unlock()
		if closed {
			return false
		}
		select {
		case <-t.C:
			return true
		case <-changed:
		}
	}
}

func (p *Proxies) wait(peers []string, name string) bool { return p.waitLists(peers, []string{name}) }

// waitLists waits until nothing is held between from and to any more; false: closed.
func (p *Proxies) waitLists(from, to []string) bool {
	for {
		w, changed := p.current(from, to)
		p.mu.Lock()
		closed := p.closed
		p.mu.Unlock()
		switch {
		case closed:
			return false
		case w.Drop < 1:
			return true
		}
		<-changed
	}
}

// Set gives one direction of a link its weather, from now on. Ports are ignored: a proxy is of one.
func (p *Proxies) Set(from, to string, w Weather) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.weather[way{from, to}] = w
	close(p.changed)
	p.changed = make(chan struct{})
}

// Counts is what has become of pieces of streams so far.
func (p *Proxies) Counts() Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.counts
}

// Close ends every connection and waits.
func (p *Proxies) Close() error {
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		close(p.changed)
		p.changed = make(chan struct{})
	}
	open := p.open
	p.open = nil
	p.mu.Unlock()
	for _, c := range open {
		_ = c.Close()
	}
	p.wg.Wait()
	return nil
}
