package supervise

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"
)

// Spec is one process to keep running.
type Spec struct {
	// Name is unique; it prefixes the child's output and names it in events.
	Name string
	Path string
	Args []string // without the program's name
	// Env is added to the supervisor's environment.
	Env []string
	// ReportsReady: the child calls [Ready]. Otherwise it counts as ready at its first
	// answer on HealthURL, or at once if there is none.
	ReportsReady bool
	// HealthURL is asked with GET every ProbeEvery; "" for no liveness check. Any
	// answer counts as life, unless NeedOK.
	HealthURL string
	// NeedOK: only a 2xx answer counts. For workers, whose /health fails when a loop
	// of theirs has died; not for a router, which is unready while workers are away.
	NeedOK bool
}

// Config of a [Supervisor]. Zero values take the defaults in brackets.
type Config struct {
	Specs []Spec
	// BackoffMin and BackoffMax bound the wait before a restart [250ms, 10s]; it doubles
	// with every life shorter than HealthyAfter [10s].
	BackoffMin, BackoffMax, HealthyAfter time.Duration
	// ProbeEvery is the pause between liveness probes [1s], ProbeTimeout bounds one [2s].
	ProbeEvery, ProbeTimeout time.Duration
	// StuckAfter is the silence after which a child is killed [15s].
	StuckAfter time.Duration
	// ReadyTimeout bounds the time from start to ready [120s].
	ReadyTimeout time.Duration
	// Grace is the time between SIGTERM and SIGKILL when the supervisor ends [10s].
	Grace time.Duration
	// GiveUp: Run ends with an *ExitError once a child has ended this many times in a
	// row without having been ready. 0: try for ever.
	GiveUp int
	// Out receives the children's output by whole lines [os.Stderr]. It need not be
	// safe for concurrent use.
	Out io.Writer
	Log *slog.Logger // [discards]
	// OnEvent hears what happens, one call at a time, in order for each child. It must
	// not block for long: the child's own life waits for it. May be nil.
	OnEvent func(Event)
}

// withDefaults returns a filled copy.
func (c Config) withDefaults() Config {
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{
		{&c.BackoffMin, 250 * time.Millisecond}, {&c.BackoffMax, 10 * time.Second}, {&c.HealthyAfter, 10 * time.Second},
		{&c.ProbeEvery, time.Second}, {&c.ProbeTimeout, 2 * time.Second}, {&c.StuckAfter, 15 * time.Second},
		{&c.ReadyTimeout, 120 * time.Second}, {&c.Grace, 10 * time.Second},
	} {
		if *d.v == 0 {
			*d.v = d.d
		}
	}
	if c.Out == nil {
		c.Out = os.Stderr
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate names the first thing wrong with c.
func (c Config) Validate() error {
	if len(c.Specs) == 0 {
		return errors.New("supervise: nothing to run")
	}
	seen := map[string]bool{}
	for _, s := range c.Specs {
		switch {
		case s.Name == "" || s.Path == "":
			return fmt.Errorf("supervise: child %q: name and path are required", s.Name)
		case seen[s.Name]:
			return fmt.Errorf("supervise: two children are named %q", s.Name)
		case s.NeedOK && s.HealthURL == "":
			return fmt.Errorf("supervise: child %q: a health address is needed to ask for a good answer", s.Name)
		}
		seen[s.Name] = true
	}
	for _, d := range []time.Duration{c.BackoffMin, c.BackoffMax, c.HealthyAfter, c.ProbeEvery, c.ProbeTimeout, c.StuckAfter, c.ReadyTimeout, c.Grace} {
		if d < 0 {
			return fmt.Errorf("supervise: a negative duration: %v", d)
		}
	}
	if c.GiveUp < 0 {
		return fmt.Errorf("supervise: negative number of tries: %d", c.GiveUp)
	}
	return nil
}

// backoff is the wait before the next start. Not safe for concurrent use.
type backoff struct{ min, max, next time.Duration }

// after returns the wait after a life that did or did not last long enough.
func (b *backoff) after(healthy bool) time.Duration {
	if healthy || b.next < b.min {
		b.next = b.min
	}
	d := min(b.next, b.max)
	b.next = min(2*d, b.max)
	return d
}
