package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

// watch tells ready once and stuck at most once. It ends with ctx, which the life's
// end cancels.
func (c *child) watch(ctx context.Context, l *life, ready chan<- ReadyInfo, stuck chan<- string) {
	limit := c.sup.cfg.ReadyTimeout
	switch {
	case l.ready != nil:
		info, err := readReady(ctx, l.ready, limit)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, os.ErrDeadlineExceeded):
			stuck <- fmt.Sprintf("not ready within %v", limit)
			return
		case err != nil:
			// The pipe also ends with the child, whose exit is about to be seen. One that
			// lives on without a report is broken.
			if pause(ctx, time.Second) {
				stuck <- err.Error()
			}
			return
		}
		ready <- info
		limit = c.sup.cfg.StuckAfter
	case c.spec.HealthURL == "":
		ready <- ReadyInfo{}
	}
	if c.spec.HealthURL != "" {
		c.probeLoop(ctx, limit, l.ready == nil, ready, stuck)
	}
}

// pause waits for d and reports whether ctx still lives.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// probeLoop asks for life until ctx ends or the child has been silent for limit
// (StuckAfter from the first good answer on). tellReady: that answer makes the child ready.
func (c *child) probeLoop(ctx context.Context, limit time.Duration, tellReady bool, ready chan<- ReadyInfo, stuck chan<- string) {
	client := &http.Client{Timeout: c.sup.cfg.ProbeTimeout, Transport: &http.Transport{DisableKeepAlives: true}}
	tick := time.NewTicker(c.sup.cfg.ProbeEvery)
	defer tick.Stop()
	for last := time.Now(); ; {
		err := c.probe(ctx, client)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			last, limit = time.Now(), c.sup.cfg.StuckAfter
			if tellReady {
				tellReady = false
				ready <- ReadyInfo{}
			}
		case time.Since(last) >= limit:
			stuck <- fmt.Sprintf("no good answer from %s for %v: %v", c.spec.HealthURL, limit, err)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// probe asks once.
func (c *child) probe(ctx context.Context, client *http.Client) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.spec.HealthURL, nil)
	if err != nil {
		return fmt.Errorf("probe %s: %w", c.spec.HealthURL, err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, maxLine))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return err
	}
	if c.spec.NeedOK && resp.StatusCode/100 != 2 {
		return fmt.Errorf("status %s", resp.Status)
	}
	return nil
}
