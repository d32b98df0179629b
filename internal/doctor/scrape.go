package doctor

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Scrape is one target's metrics at one moment, or the reason why there are none.
type Scrape struct {
	Target  string
	Time    time.Time
	Samples []Sample
	Err     string // not "": the target did not answer; Samples are empty
}

// Sample is one value. Histograms come as their _sum and _count.
type Sample struct {
	Name   string
	Labels map[string]string // without __name__
	Value  float64
}

// Label values that no rule reads would only cost memory.
const bucketSuffix = "_bucket"

// ParseText reads one scrape in Prometheus' text form, without buckets and without
// values that are no numbers.
func ParseText(r io.Reader) ([]Sample, error) {
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(r)
	if err != nil {
		return nil, fmt.Errorf("not metrics in Prometheus' text form: %w", err)
	}
	var out []Sample
	for _, f := range families {
		vec, err := expfmt.ExtractSamples(&expfmt.DecodeOptions{}, f)
		if err != nil {
			return nil, fmt.Errorf("metric %s: %w", f.GetName(), err)
		}
		for _, s := range vec {
			name := string(s.Metric[model.MetricNameLabel])
			if strings.HasSuffix(name, bucketSuffix) || math.IsNaN(float64(s.Value)) {
				continue
			}
			labels := make(map[string]string, len(s.Metric)-1)
			for k, v := range s.Metric {
				if k != model.MetricNameLabel {
					labels[string(k)] = string(v)
				}
			}
			out = append(out, Sample{Name: name, Labels: labels, Value: float64(s.Value)})
		}
	}
	return out, nil
}

// header begins a scrape in a saved file. Its fields are target, time (RFC 3339), and, for the
// first one of a target, version and backend.
const header = "# baton-doctor "

// Header is the line that [ParseFile] needs to know whose and when a scrape is.
func Header(target string, at time.Time, version, backend string) string {
	line := fmt.Sprintf("%starget=%s time=%s", header, target, at.UTC().Format(time.RFC3339Nano))
	if version != "" {
		line += " version=" + version
	}
	if backend != "" {
		line += " backend=" + backend
	}
	return line + "\n"
}

// Saved is what a file of scrapes holds.
type Saved struct {
	Scrapes []Scrape
	About   map[string]About // by target
}

// About is what is known of a target besides its metrics; empty fields are not known.
type About struct {
	Version string // release of the engine
	Backend string // transfer backend: "nixl", "mooncake", ...
}

// maxLine is above any line of a scrape.
const maxLine = 1 << 20

// ParseFile reads saved scrapes. Each begins with a [Header]; a file without any is one
// scrape of target name whose Time is zero, so that the caller gives it its place in time.
func ParseFile(name string, r io.Reader) (Saved, error) {
	out := Saved{About: map[string]About{}}
	var at *Scrape
	var text strings.Builder
	line := 0
	flush := func() error {
		if at == nil {
			if strings.TrimSpace(text.String()) == "" {
				return nil
			}
			at = &Scrape{Target: name}
		}
		var err error
		if at.Samples, err = ParseText(strings.NewReader(text.String())); err != nil {
			return fmt.Errorf("%s: the scrape before line %d: %w", name, line+1, err)
		}
		if at.Err != "" && len(at.Samples) > 0 {
			return fmt.Errorf("%s: the scrape before line %d failed and has samples", name, line+1)
		}
		out.Scrapes = append(out.Scrapes, *at)
		text.Reset()
		return nil
	}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for ; lines.Scan(); line++ {
		fields, is := strings.CutPrefix(lines.Text(), header)
		if !is {
			text.WriteString(lines.Text() + "\n")
			continue
		}
		if err := flush(); err != nil {
			return Saved{}, err
		}
		s, about, err := parseHeader(fields)
		if err != nil {
			return Saved{}, fmt.Errorf("%s:%d: %w", name, line+1, err)
		}
		at = &s
		if about != (About{}) {
			out.About[s.Target] = about
		}
	}
	if err := lines.Err(); err != nil {
		return Saved{}, fmt.Errorf("%s: %w", name, err)
	}
	return out, flush()
}

// failedField marks a scrape that got no answer; its value is the rest of the line.
const failedField = "failed="

// FailedHeader is the header of a scrape that failed.
func FailedHeader(target string, at time.Time, why string) string {
	return strings.TrimSuffix(Header(target, at, "", ""), "\n") + " " + failedField + strings.Join(strings.Fields(why), " ") + "\n"
}

func parseHeader(text string) (Scrape, About, error) {
	var s Scrape
	var about About
	text, why, failed := strings.Cut(text, failedField)
	if failed {
		s.Err = why
	}
	for _, f := range strings.Fields(text) {
		k, v, ok := strings.Cut(f, "=")
		if !ok {
			return s, about, fmt.Errorf("header field %q is not key=value", f)
		}
		switch k {
		case "target":
			s.Target = v
		case "time":
			at, err := time.Parse(time.RFC3339Nano, v)
			if err != nil {
				return s, about, fmt.Errorf("header: %w", err)
			}
			s.Time = at
		case "version":
			about.Version = v
		case "backend":
			about.Backend = v
		default:
			return s, about, fmt.Errorf("header field %q is not known", k)
		}
	}
	if s.Target == "" || s.Time.IsZero() {
		return s, about, fmt.Errorf("header needs target= and time=")
	}
	return s, about, nil
}

// Build makes targets of scrapes, sorted by name, each in order of time. Two scrapes of a target at one
// moment are an error.
func Build(scrapes []Scrape, about map[string]About) ([]*Target, error) {
	by := map[string][]Scrape{}
	for _, s := range scrapes {
		by[s.Target] = append(by[s.Target], s)
	}
	var out []*Target
	for name, list := range by {
		slices.SortStableFunc(list, func(a, b Scrape) int { return a.Time.Compare(b.Time) })
		t := &Target{Name: name, About: about[name], series: map[string][]*series{}, index: map[string]*series{}}
		for i, s := range list {
			if i > 0 && s.Time.Equal(list[i-1].Time) {
				return nil, fmt.Errorf("target %s has two scrapes of %s; give scrapes of other workers other names", name, s.Time.Format(time.RFC3339Nano))
			}
			t.add(s)
		}
		t.recognize()
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b *Target) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}
