package supervise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// Supervisor keeps the processes of its [Config] running.
type Supervisor struct {
	cfg  Config
	out  lineWriter
	mu   sync.Mutex // serialises OnEvent
	life *os.File   // read end of the lifeline, inherited by every child
	sp   *spawner
}

// New checks the configuration; nothing runs before [Supervisor.Run].
func New(c Config) (*Supervisor, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c = c.withDefaults()
	return &Supervisor{cfg: c, out: lineWriter{out: c.Out}}, nil
}

// Run starts the children in order and keeps them running until ctx ends, then ends
// them all and returns nil; or until one has to be given up, then it ends them
// all and returns an [*ExitError]. No child is left when it returns. Run may be called once.
func (s *Supervisor) Run(ctx context.Context) error {
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("open lifeline: %w", err)
	}
	// w is never written and closes with this process; children inherit only r.
	defer func() { _, _ = r.Close(), w.Close() }()
	s.life, s.sp = r, newSpawner()
	defer s.sp.close()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, spec := range s.cfg.Specs {
		c := &child{sup: s, spec: spec, backoff: backoff{min: s.cfg.BackoffMin, max: s.cfg.BackoffMax}}
		started := make(chan struct{})
		wg.Go(func() {
			if err := c.run(ctx, started); err != nil {
				cancel(err)
			}
		})
		<-started
	}
	wg.Wait()
	var gaveUp *ExitError
	if errors.As(context.Cause(ctx), &gaveUp) {
		return gaveUp
	}
	return nil
}

// emit logs an event and hands it on.
func (s *Supervisor) emit(e Event) {
	e.Time = time.Now()
	args := []any{"child", e.Name, "pid", e.PID, "life", e.Life}
	if e.Reason != "" {
		args = append(args, "reason", e.Reason)
	}
	switch {
	case e.Kind == EventStuck, e.Kind == EventExited && !e.Expected:
		s.cfg.Log.Warn("child "+e.Kind.String(), args...)
	case e.Kind == EventRestarting:
		s.cfg.Log.Info("child restarting", append(args, "backoff", e.Backoff)...)
	default:
		s.cfg.Log.Info("child "+e.Kind.String(), args...)
	}
	if s.cfg.OnEvent == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cfg.OnEvent(e)
}
