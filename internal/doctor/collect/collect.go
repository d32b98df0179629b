// Package collect brings scrapes to the doctor: from metrics URLs over a window, from a
// Prometheus server's memory, or from saved files.
package collect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/doctor"
)

// Limits of what a server may answer, in bytes: a fleet's series over a window, and a worker's /server_info.
const (
	maxBody = 64 << 20
	maxInfo = 8 << 20
)

// Endpoint is a worker's metrics page.
type Endpoint struct {
	Name string
	URL  string // http://host:port/metrics
}

// ParseEndpoint reads NAME=URL, or a URL, whose host:port then is the name. A URL without a path gets /metrics.
func ParseEndpoint(text string) (Endpoint, error) {
	name, rest, named := strings.Cut(text, "=")
	if !named || strings.Contains(name, "/") {
		name, rest = "", text
	}
	u, err := url.Parse(rest)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return Endpoint{}, fmt.Errorf("%q is not NAME=http://host:port/metrics", text)
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/metrics"
	}
	if name == "" {
		name = u.Host
	}
	if strings.ContainsAny(name, " \t\n") {
		return Endpoint{}, fmt.Errorf("the name %q has a space in it", name)
	}
	return Endpoint{Name: name, URL: u.String()}, nil
}

// Watch is a window of scrapes.
type Watch struct {
	Endpoints []Endpoint
	Window    time.Duration // from the first round to the last; > 0
	Interval  time.Duration // between rounds; > 0
	Timeout   time.Duration // of one scrape; > 0
	// Save, if not "", is a directory that gets each target's scrapes as they come, in a file that
	// [Files] reads.
	Save   string
	Client *http.Client // nil: http.DefaultClient
}

// Run scrapes every endpoint at once, again and again until the window is over. A scrape that fails
// is a scrape with its reason; only ctx's end and files that can not be written are errors.
func (w Watch) Run(ctx context.Context) ([]doctor.Scrape, map[string]doctor.About, error) {
	about := w.about(ctx)
	sinks, err := w.open()
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		for _, f := range sinks {
			_ = f.Close() // written and synced line by line; nothing is left to fail
		}
	}()
	var out []doctor.Scrape
	tick := time.NewTicker(w.Interval)
	defer tick.Stop()
	for end := time.Now().Add(w.Window); ; {
		round, err := w.round(ctx, sinks, about, len(out) == 0)
		if err != nil {
			return nil, nil, err
		}
		out = append(out, round...)
		if !time.Now().Before(end) {
			return out, about, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("the window was cut short: %w", context.Cause(ctx))
		}
	}
}

func (w Watch) open() (map[string]*os.File, error) {
	if w.Save == "" {
		return nil, nil
	}
	if err := os.MkdirAll(w.Save, 0o755); err != nil {
		return nil, err
	}
	out := map[string]*os.File{}
	for _, e := range w.Endpoints {
		f, err := os.Create(filepath.Join(w.Save, fileName(e.Name)))
		if err != nil {
			return nil, err
		}
		out[e.Name] = f
	}
	return out, nil
}

// fileName keeps what is safe in a file's name.
func fileName(target string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-._", r) {
			return r
		}
		return '_'
	}, target) + ".prom"
}

// round scrapes every endpoint once, all at a time.
func (w Watch) round(ctx context.Context, sinks map[string]*os.File, about map[string]doctor.About, first bool) ([]doctor.Scrape, error) {
	out := make([]doctor.Scrape, len(w.Endpoints))
	texts := make([]string, len(w.Endpoints))
	var wg sync.WaitGroup
	for i, e := range w.Endpoints {
		wg.Go(func() {
			out[i], texts[i] = w.scrape(ctx, e)
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("the window was cut short: %w", context.Cause(ctx))
	}
	for i, e := range w.Endpoints {
		f := sinks[e.Name]
		if f == nil {
			continue
		}
		head := doctor.FailedHeader(e.Name, out[i].Time, out[i].Err)
		if out[i].Err == "" {
			a := doctor.About{}
			if first {
				a = about[e.Name]
			}
			head = doctor.Header(e.Name, out[i].Time, a.Version, a.Backend)
		}
		if _, err := io.WriteString(f, head+texts[i]); err != nil {
			return nil, fmt.Errorf("save scrapes: %w", err)
		}
	}
	return out, nil
}

func (w Watch) scrape(ctx context.Context, e Endpoint) (doctor.Scrape, string) {
	s := doctor.Scrape{Target: e.Name, Time: time.Now()}
	body, err := get(ctx, w.Client, w.Timeout, e.URL, maxBody)
	if err == nil {
		s.Samples, err = doctor.ParseText(strings.NewReader(string(body)))
	}
	if err != nil {
		s.Err = err.Error()
		return s, ""
	}
	return s, string(body)
}

// about asks every worker once for its release.
func (w Watch) about(ctx context.Context) map[string]doctor.About {
	var mu sync.Mutex
	out := map[string]doctor.About{}
	var wg sync.WaitGroup
	for _, e := range w.Endpoints {
		wg.Go(func() {
			if a := askAbout(ctx, w.Client, w.Timeout, e.URL); a != (doctor.About{}) {
				mu.Lock()
				out[e.Name] = a
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return out
}

// askAbout reads /server_info (SGLang, Baton), then /get_server_info (SGLang before 0.5), then
// /version (vLLM) beside the metrics. What does not answer is not known.
func askAbout(ctx context.Context, c *http.Client, timeout time.Duration, metrics string) doctor.About {
	u, err := url.Parse(metrics)
	if err != nil {
		return doctor.About{}
	}
	for _, path := range []string{"/server_info", "/get_server_info", "/version"} {
		u.Path, u.RawQuery = path, ""
		body, err := get(ctx, c, timeout, u.String(), maxInfo)
		if err != nil {
			continue
		}
		var info struct {
			Version string `json:"version"`
			Backend string `json:"disaggregation_transfer_backend"`
		}
		if json.Unmarshal(body, &info) == nil && info.Version != "" {
			return doctor.About{Version: strings.Join(strings.Fields(info.Version), "_"), Backend: strings.Join(strings.Fields(info.Backend), "_")}
		}
	}
	return doctor.About{}
}

// get is the body of a 200 within timeout.
func get(ctx context.Context, c *http.Client, timeout time.Duration, url string, most int64) ([]byte, error) {
	ctx, stop := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within %s", timeout))
	defer stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	return do(ctx, c, req, most)
}

func do(ctx context.Context, c *http.Client, req *http.Request, most int64) ([]byte, error) {
	if c == nil {
		c = http.DefaultClient
	}
	res, err := c.Do(req)
	if err != nil {
		return nil, plain(ctx, err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, most+1))
	switch {
	case err != nil:
		return nil, plain(ctx, fmt.Errorf("read %s: %w", req.URL.Redacted(), err))
	case int64(len(body)) > most:
		return nil, fmt.Errorf("%s answers with more than %d bytes", req.URL.Redacted(), most)
	case res.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s answers %s: %.200s", req.URL.Redacted(), res.Status, strings.TrimSpace(string(body)))
	}
	return body, nil
}

// plain puts the cause of ctx's end in the place of "context deadline exceeded".
func plain(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, ctx.Err()) {
		return fmt.Errorf("%w (%v)", cause, err)
	}
	return err
}

// Files reads saved scrapes in the order given. A file that [Watch] has saved knows whose and when its
// scrapes are; any other is one scrape, interval after the last one of the same target, which is NAME of
// NAME=FILE, or "saved".
func Files(args []string, interval time.Duration) ([]doctor.Scrape, map[string]doctor.About, error) {
	var out []doctor.Scrape
	about := map[string]doctor.About{}
	next := map[string]time.Time{}
	for _, arg := range args {
		name, file, named := strings.Cut(arg, "=")
		if !named {
			name, file = "saved", arg
		}
		saved, err := parse(name, file)
		if err != nil {
			return nil, nil, err
		}
		for _, s := range saved.Scrapes {
			if s.Time.IsZero() {
				if next[s.Target].IsZero() {
					next[s.Target] = time.Unix(0, 0)
				}
				s.Time = next[s.Target]
			}
			next[s.Target] = s.Time.Add(interval)
			out = append(out, s)
		}
		for t, a := range saved.About {
			about[t] = a
		}
	}
	return out, about, nil
}

func parse(name, file string) (doctor.Saved, error) {
	f, err := os.Open(file)
	if err != nil {
		return doctor.Saved{}, err
	}
	defer f.Close()
	saved, err := doctor.ParseFile(name, f)
	if err != nil {
		return doctor.Saved{}, fmt.Errorf("%s: %w", file, err)
	}
	return saved, nil
}
