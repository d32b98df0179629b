package collect

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/doctor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// worker serves metrics whose counter is the number of scrapes; every failAt-th is refused.
func worker(t *testing.T, failAt int64, info string) (*httptest.Server, *http.Client) {
	t.Helper()
	var n atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		if i := n.Add(1); failAt > 0 && i%failAt == 0 {
			http.Error(w, "too busy", http.StatusServiceUnavailable)
		} else {
			fmt.Fprintf(w, "# TYPE sglang:num_requests_total counter\nsglang:num_requests_total{engine_type=\"prefill\"} %d\n", i)
		}
	})
	if info != "" {
		path, body, _ := strings.Cut(info, " ")
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) })
	}
	s := httptest.NewServer(mux)
	c := s.Client()
	t.Cleanup(func() { c.CloseIdleConnections(); s.Close() })
	return s, c
}

// TestWatchAndSave: a window of scrapes, its failures among them, is what the saved files say too.
func TestWatchAndSave(t *testing.T) {
	s, client := worker(t, 3, `/server_info {"version":"0.5.23","disaggregation_transfer_backend":"nixl","x":[1]}`)
	dir := filepath.Join(t.TempDir(), "new")
	w := Watch{Endpoints: []Endpoint{{"p/0", s.URL + "/metrics"}}, Window: 60 * time.Millisecond, Interval: 10 * time.Millisecond, Timeout: 5 * time.Second, Save: dir, Client: client}
	scrapes, about, err := w.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(scrapes) < 3 || scrapes[0].Err != "" || len(scrapes[0].Samples) != 1 || !strings.Contains(scrapes[2].Err, "503") || !strings.Contains(scrapes[2].Err, "too busy") {
		t.Errorf("scrapes: %+v", scrapes)
	}
	if about["p/0"] != (doctor.About{Version: "0.5.23", Backend: "nixl"}) {
		t.Errorf("about: %v", about)
	}
	back, aboutBack, err := Files([]string{filepath.Join(dir, "p_0.prom")}, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if len(back) != len(scrapes) || aboutBack["p/0"] != about["p/0"] {
		t.Fatalf("%d scrapes come back of %d, about %v", len(back), len(scrapes), aboutBack)
	}
	for i, b := range back {
		if a := scrapes[i]; b.Target != a.Target || !b.Time.Equal(a.Time) || b.Err != a.Err || fmt.Sprint(b.Samples) != fmt.Sprint(a.Samples) {
			t.Errorf("scrape %d was %+v, comes back as %+v", i, a, b)
		}
	}
}

// TestOtherWaysToTheRelease: vLLM's, old SGLang's, and none.
func TestOtherWaysToTheRelease(t *testing.T) {
	for info, want := range map[string]string{
		`/version {"version":"0.11.0"}`: "0.11.0", `/get_server_info {"version":"0.4.9"}`: "0.4.9",
		"": "", "/server_info <html>": "", `/server_info {"version":7}`: "",
	} {
		s, client := worker(t, 0, info)
		if a := askAbout(t.Context(), client, 5*time.Second, s.URL+"/metrics"); a.Version != want {
			t.Errorf("%q: version %q, want %q", info, a.Version, want)
		}
	}
}

// TestNoAnswer: refused, slow and foreign answers are scrapes with a reason.
func TestNoAnswer(t *testing.T) {
	slow := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/html" {
			fmt.Fprint(w, "<html>hello</html>")
			return
		}
		<-slow
	}))
	client := s.Client()
	defer func() { close(slow); client.CloseIdleConnections(); s.Close() }()
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	for url, want := range map[string]string{s.URL + "/slow": "no answer within 50ms", s.URL + "/html": "not metrics", gone.URL: "refused"} {
		sc, _ := Watch{Timeout: 50 * time.Millisecond, Client: client}.scrape(t.Context(), Endpoint{"x", url})
		if !strings.Contains(sc.Err, want) {
			t.Errorf("%s: %q lacks %q", url, sc.Err, want)
		}
	}
}

func TestWatchStopsWithItsContext(t *testing.T) {
	s, client := worker(t, 0, "")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	_, _, err := Watch{Endpoints: []Endpoint{{"p", s.URL + "/metrics"}}, Window: time.Hour, Interval: time.Hour, Timeout: time.Second, Client: client}.Run(ctx)
	if err == nil || !strings.Contains(err.Error(), "enough") {
		t.Errorf("%v", err)
	}
}

func TestParseEndpoint(t *testing.T) {
	for text, want := range map[string]Endpoint{
		"http://h:1/metrics":            {"h:1", "http://h:1/metrics"},
		"p-0=http://h:1":                {"p-0", "http://h:1/metrics"},
		"p=https://h/x/metrics?job=a=b": {"p", "https://h/x/metrics?job=a=b"},
		"http://h:1/metrics?job=a":      {"h:1", "http://h:1/metrics?job=a"},
		"h:1":                           {}, "p=h:1": {}, "": {}, "p=": {}, "ftp://h": {}, "a b=http://h": {},
	} {
		e, err := ParseEndpoint(text)
		if e != want || (err == nil) != (want != Endpoint{}) {
			t.Errorf("%q is %+v, %v; want %+v", text, e, err, want)
		}
	}
}

// TestPlainFiles: scrapes that do not say when they are from are an interval apart, each target's by itself.
func TestPlainFiles(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	a, b := file("a", "x 1\n"), file("b", "x 2\n")
	scrapes, _, err := Files([]string{"p=" + a, "d=" + a, "p=" + b, a}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range scrapes {
		got = append(got, fmt.Sprint(s.Target, s.Time.Unix(), s.Samples[0].Value))
	}
	if fmt.Sprint(got) != "[p0 1 d0 1 p60 2 saved0 1]" {
		t.Error(got)
	}
	for _, bad := range [][]string{{"nowhere"}, {file("bad", "{{{\n")}} {
		if _, _, err := Files(bad, time.Minute); err == nil {
			t.Errorf("%v is accepted", bad)
		}
	}
}

// TestPrometheusAnswers: a matrix becomes scrapes of each instance; moments at which it was down are failures.
func TestPrometheusAnswers(t *testing.T) {
	answer := func(w http.ResponseWriter, r *http.Request) {
		q := r.FormValue("query")
		if !strings.Contains(q, `namespace="prod"`) || r.FormValue("step") != "10" || r.FormValue("end") == "" {
			http.Error(w, `{"status":"error","error":"bad query"}`, http.StatusBadRequest)
			return
		}
		if strings.HasPrefix(q, `{__name__=~"up"`) {
			fmt.Fprint(w, `{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"__name__":"up","instance":"a:1"},"values":[[100,"1"],[110.001,"0"],[120,"1"]]},
				{"metric":{"__name__":"up","instance":"other:9"},"values":[[100,"0"]]}]}}`)
			return
		}
		fmt.Fprint(w, `{"status":"success","data":{"resultType":"matrix","result":[
			{"metric":{"__name__":"sglang:num_queue_reqs","instance":"a:1","engine_type":"decode"},"values":[[100,"3"],[120,"NaN"]]},
			{"metric":{"__name__":"sglang:num_running_reqs","instance":"a:1","engine_type":"decode"},"values":[[100,"1"],[110.001,"1"],[120,"2"]]},
			{"metric":{"__name__":"process_start_time_seconds","instance":"other:9"},"values":[[100,"7"]]}]}}`)
	}
	s := httptest.NewServer(http.HandlerFunc(answer))
	client := s.Client()
	defer func() { client.CloseIdleConnections(); s.Close() }()
	p := Prometheus{URL: s.URL + "/", Selector: `namespace="prod"`, Window: time.Minute, Step: 10 * time.Second, Timeout: 5 * time.Second, Client: client}
	scrapes, err := p.Scrapes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, sc := range scrapes {
		got = append(got, fmt.Sprint(sc.Target, " ", sc.Time.UnixMilli(), " ", len(sc.Samples), " ", sc.Err))
	}
	if want := "a:1 100000 2 |a:1 110001 0 Prometheus could not scrape it|a:1 120000 1 "; strings.Join(got, "|") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, "|"), want)
	}
	p.Selector = ""
	if _, err := p.Scrapes(t.Context()); err == nil || !strings.Contains(err.Error(), "bad query") {
		t.Errorf("a refused query: %v", err)
	}
}

func TestPrometheusNonsense(t *testing.T) {
	for _, body := range []string{"", "<html>", `{"status":"error"}`, `{"status":"success","data":{"resultType":"vector","result":[]}}`,
		`{"status":"success","data":{"resultType":"matrix","result":[{"values":[[1]]}]}}`, `{"status":"success","data":{"resultType":"matrix","result":[{"values":[[1,"x"]]}]}}`} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) }))
		client := s.Client()
		if got, err := (Prometheus{URL: s.URL, Window: time.Minute, Step: time.Second, Timeout: 5 * time.Second, Client: client}).Scrapes(t.Context()); err == nil {
			t.Errorf("%q is accepted: %v", body, got)
		}
		client.CloseIdleConnections()
		s.Close()
	}
}
