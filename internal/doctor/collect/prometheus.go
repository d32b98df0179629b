package collect

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/baton-pd/baton/internal/doctor"
)

// Prometheus is a server that has scraped the fleet.
type Prometheus struct {
	URL      string // http://host:port, perhaps with a path before /api
	Selector string // more label matchers, as inside the braces of a query: `namespace="prod"`; "" for none
	Window   time.Duration
	Step     time.Duration // > 0
	Timeout  time.Duration // of the query; > 0
	End      time.Time     // of the window; zero: now
	Client   *http.Client
}

// up is Prometheus' own series about each of its targets: 0 if the scrape failed.
const up = "up"

// Scrapes asks for every series that the rules read and cuts it into scrapes. A target's name is its label
// instance.
func (p Prometheus) Scrapes(ctx context.Context) ([]doctor.Scrape, error) {
	found, err := p.query(ctx, doctor.MetricNames())
	if err != nil {
		return nil, err
	}
	ours := map[string]bool{}
	for _, s := range found {
		if doctor.Ours(s.Metric["__name__"]) {
			ours[s.Metric["instance"]] = true
		}
	}
	if len(ours) == 0 {
		return nil, nil
	}
	ups, err := p.query(ctx, []string{up})
	if err != nil {
		return nil, err
	}
	type moment struct {
		target string
		at     time.Time
	}
	at := map[moment]*doctor.Scrape{}
	scrape := func(m moment) *doctor.Scrape {
		if at[m] == nil {
			at[m] = &doctor.Scrape{Target: m.target, Time: m.at}
		}
		return at[m]
	}
	for _, s := range append(found, ups...) {
		name, target := s.Metric["__name__"], s.Metric["instance"]
		if !ours[target] {
			continue
		}
		labels := maps.Clone(s.Metric)
		delete(labels, "__name__")
		for _, v := range s.Values {
			sc := scrape(moment{target, v.at})
			switch {
			case name == up && v.value == 0:
				sc.Err = "Prometheus could not scrape it"
			case name != up && !math.IsNaN(v.value):
				sc.Samples = append(sc.Samples, doctor.Sample{Name: name, Labels: labels, Value: v.value})
			}
		}
	}
	var out []doctor.Scrape
	for _, s := range at {
		if s.Err != "" {
			s.Samples = nil // what Prometheus remembers of a target that it can not scrape is old
		}
		if s.Err != "" || len(s.Samples) > 0 {
			out = append(out, *s)
		}
	}
	slices.SortFunc(out, func(a, b doctor.Scrape) int {
		if c := a.Time.Compare(b.Time); c != 0 {
			return c
		}
		return strings.Compare(a.Target, b.Target)
	})
	return out, nil
}

// matrix is one series of an answer.
type matrix struct {
	Metric map[string]string `json:"metric"`
	Values []point           `json:"values"`
}

// point is [unix seconds, "value"].
type point struct {
	at    time.Time
	value float64
}

func (p *point) UnmarshalJSON(b []byte) error {
	var raw [2]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return err
	}
	var sec float64
	var text string
	if err := json.Unmarshal(raw[0], &sec); err != nil {
		return err
	}
	if err := json.Unmarshal(raw[1], &text); err != nil {
		return err
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return err
	}
	p.at, p.value = time.UnixMilli(int64(math.Round(sec*1000))), v
	return nil
}

// query asks for the series of these names over the window.
func (p Prometheus) query(ctx context.Context, names []string) ([]matrix, error) {
	q := fmt.Sprintf("{__name__=~%q", strings.Join(names, "|"))
	if p.Selector != "" {
		q += "," + p.Selector
	}
	q += "}"
	end := p.End
	if end.IsZero() {
		end = time.Now()
	}
	seconds := func(t time.Time) string { return strconv.FormatFloat(float64(t.UnixMilli())/1000, 'f', 3, 64) }
	form := url.Values{"query": {q}, "start": {seconds(end.Add(-p.Window))}, "end": {seconds(end)},
		"step": {strconv.FormatFloat(p.Step.Seconds(), 'f', -1, 64)}}
	ctx, stop := context.WithTimeoutCause(ctx, p.Timeout, fmt.Errorf("no answer within %s", p.Timeout))
	defer stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(p.URL, "/")+"/api/v1/query_range", strings.NewReader(form.Encode()))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	body, err := do(ctx, p.Client, req, maxBody)
	if err != nil {
		return nil, fmt.Errorf("ask Prometheus: %w", err)
	}
	var answer struct {
		Status string `json:"status"`
		Error  string `json:"error"`
		Data   struct {
			Type   string   `json:"resultType"`
			Result []matrix `json:"result"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, fmt.Errorf("ask Prometheus: its answer is no JSON of the expected form: %w", err)
	}
	if answer.Status != "success" || answer.Data.Type != "matrix" {
		return nil, fmt.Errorf("ask Prometheus: status %q, type %q, %s", answer.Status, answer.Data.Type, answer.Error)
	}
	return answer.Data.Result, nil
}
