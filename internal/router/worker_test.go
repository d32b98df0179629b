package router

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// hung answers no probe until its connection ends.
func hung(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

func (f *fake) setHealth(h func(http.ResponseWriter, *http.Request)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.health = h
}

func TestHungWorkerGoesOutAndComesBack(t *testing.T) {
	inBubble(t, Config{HealthTimeout: time.Second}, []script{okPrefill}, []script{okAnswer, okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		d[0].setHealth(hung)
		<-time.After(2500 * time.Millisecond) // one probe, at most, has been missed
		if w := b.r.decodes.workers()[0]; w.status() != statusUp {
			t.Fatalf("out after one missed probe: %s", w.why())
		}
		<-time.After(time.Second)
		if w := b.r.decodes.workers()[0]; w.status() != statusOut {
			t.Fatalf("a hung worker is %s", w.why())
		}
		for range 4 {
			b.chat().ok(t, chatAnswer)
		}
		if n := d[0].count(); n > 0 {
			t.Errorf("a worker that is out got %d requests", n)
		}
		d[0].setHealth(nil)
		<-time.After(3 * time.Second)
		if w := b.r.decodes.workers()[0]; w.status() != statusUp {
			t.Errorf("a healed worker is %s", w.why())
		}
	})
}

func TestSickWorkerGoesOut(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		p[0].setHealth(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = w.Write([]byte("loop died"))
		})
		<-time.After(1100 * time.Millisecond)
		e := b.chat().fails(t, 503, "unavailable")
		if want := "no usable prefill worker: p0:80 (health probe: status 503: loop died, out for "; len(e.Error.Message) < len(want) || e.Error.Message[:len(want)] != want {
			t.Errorf("message %q", e.Error.Message)
		}
		if n := p[0].count() + d[0].count(); n > 0 {
			t.Errorf("%d requests were sent", n)
		}
	})
}

// A worker that restarts at its address is used again within a moment, whatever the interval.
func TestRestartedWorkerComesBackSoon(t *testing.T) {
	inBubble(t, Config{HealthInterval: time.Minute}, []script{okPrefill}, []script{after(time.Second, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chat().ok(t, chatAnswer)
		p[0].kill()
		synctest.Wait()
		b.chat().fails(t, 503, "unavailable")
		p[0].start()
		<-time.After(time.Second)
		b.chat().ok(t, chatAnswer)
	})
}

// One of two prefill workers refuses: no request fails.
func TestRefusingWorkerCostsNothing(t *testing.T) {
	inBubble(t, Config{Policy: PolicyRoundRobin}, []script{okPrefill, okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		p[0].kill()
		for range 4 {
			b.chat().ok(t, chatAnswer)
		}
	})
}

func TestLeastInflight(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{silent, okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		first := make(chan got)
		go func() { first <- b.chat(HeaderTimeout, "60000") }() // the first turn is d0's
		synctest.Wait()
		for range 4 {
			b.chat().ok(t, chatAnswer)
		}
		if d[0].count() != 1 || d[1].count() != 4 {
			t.Errorf("requests: d0 %d, d1 %d", d[0].count(), d[1].count())
		}
		(<-first).fails(t, 504, "deadline")
	})
}

func TestPick(t *testing.T) {
	var f fleet
	if w := f.pick(nil); w != nil || f.why() == "" {
		t.Error("picked from nothing")
	}
	ws := []*worker{{}, {}, {}}
	f.set.Store(&ws)
	ws[1].state.Store(uint32(statusOut))
	seen := map[*worker]int{}
	for range 6 {
		seen[f.pick(nil)]++
	}
	if seen[ws[1]] != 0 || seen[ws[0]] == 0 || seen[ws[2]] == 0 {
		t.Errorf("picks %v", seen)
	}
	if w := f.pick(map[*worker]bool{ws[0]: true, ws[2]: true}); w != nil {
		t.Errorf("picked a worker that was to be avoided or is out")
	}
}

func TestConfigIsChecked(t *testing.T) {
	good := Config{Prefills: []Backend{{URL: "http://a:1", BootstrapPort: 1}}, Decodes: []Backend{{URL: "http://b:1"}}}
	for name, change := range map[string]func(c *Config){
		"no prefill": func(c *Config) { c.Prefills = nil },
		"no decode":  func(c *Config) { c.Decodes = nil },
		"policy":     func(c *Config) { c.Policy = "best" },
		"duration":   func(c *Config) { c.DialTimeout = -1 },
		"limit":      func(c *Config) { c.MaxBody = -1 },
		"header":     func(c *Config) { c.SessionHeader = "X Session" },
		"deadline":   func(c *Config) { c.DefaultTimeout, c.MaxTimeout = 2, 1 },
		"address":    func(c *Config) { c.Decodes = []Backend{{URL: "b:1"}} },
		"no host":    func(c *Config) { c.Decodes = []Backend{{URL: "http://"}} },
		"bootstrap":  func(c *Config) { c.Prefills = []Backend{{URL: "http://a:1"}} },
		"twice":      func(c *Config) { c.Decodes = append(c.Decodes, c.Decodes[0]) },
	} {
		c := good
		change(&c)
		if r, err := New(c); err == nil {
			r.Close()
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestNamesSurvive(t *testing.T) {
	if s := status(9).String(); s != "status(9)" {
		t.Error(s)
	}
	if s := legPhase(9).String(); s != "phase(9)" {
		t.Error(s)
	}
}
