package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/stack"
)

const (
	rulesFile     = "../../deploy/prometheus/baton.rules.yml"
	rulesTests    = "../../deploy/prometheus/baton.test.yml"
	dashboardFile = "../../deploy/grafana/baton.json"
	sglangNames   = "../doctor/testdata/sglang-0.5.23-names.txt"
)

// debian is a program that `make testdeps` installs.
func debian(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil && os.Getenv("BATON_NEED_MODEL") != "" { // make test: it has been installed
		t.Fatal(err)
	}
	if err != nil {
		t.Skipf("%v; run `make testdeps`", err)
	}
	return path
}

// TestAlertRules: promtool accepts the rules, and each alert's unit test holds.
func TestAlertRules(t *testing.T) {
	promtool := debian(t, "promtool")
	for _, args := range [][]string{{"check", "rules", rulesFile}, {"test", "rules", rulesTests}} {
		if out, err := exec.Command(promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
	rules, tests := fileText(t, rulesFile), fileText(t, rulesTests)
	for _, m := range regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(rules, -1) {
		if !strings.Contains(tests, `alertname="`+m[1]+`"`) {
			t.Errorf("alert %s has no unit test", m[1])
		}
	}
}

func fileText(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// prom is a running Prometheus server.
type prom struct{ url string }

// startPrometheus runs Debian's Prometheus on the stack's metrics, once a second, with our rules.
func startPrometheus(t *testing.T, s *stack.Stack) prom {
	t.Helper()
	path := debian(t, "prometheus")
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	var targets []string
	for _, p := range s.All() {
		targets = append(targets, fmt.Sprintf("%q", p.HTTP))
	}
	dir := t.TempDir()
	config := fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%q]\nscrape_configs:\n- job_name: baton\n  static_configs: [{targets: [%s]}]\n", rules, strings.Join(targets, ", "))
	if err := os.WriteFile(filepath.Join(dir, "prometheus.yml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	addr, err := stack.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--config.file", filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path", filepath.Join(dir, "data"), "--web.listen-address", addr, "--log.level", "warn")
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
		_ = log.Close()
		if t.Failed() {
			t.Logf("--- prometheus\n%s", fileText(t, log.Name()))
		}
	})
	p := prom{"http://" + addr}
	eventually(t, 30*time.Second, func(ctx context.Context) error { _, err := p.get(ctx, "/-/ready", nil); return err })
	return p
}

func (p prom) get(ctx context.Context, path string, query url.Values) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+path+"?"+query.Encode(), nil)
	if err != nil {
		return nil, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, res.Status, body)
	}
	return body, err
}

// data decodes the data of an API answer.
func (p prom) data(ctx context.Context, path string, query url.Values, into any) error {
	body, err := p.get(ctx, path, query)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, &struct {
		Data any `json:"data"`
	}{into})
}

// size is how many series an instant query gives.
func (p prom) size(ctx context.Context, expr string) (int, error) {
	var d struct {
		Result []json.RawMessage `json:"result"`
	}
	err := p.data(ctx, "/api/v1/query", url.Values{"query": {expr}}, &d)
	return len(d.Result), err
}

// TestMonitoring: the real Prometheus scrapes a stack, evaluates every rule and every query of the dashboard,
// and `baton doctor` reads a stuck transfer from its memory.
func TestMonitoring(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", model: "layers=2", faults: "post nth=9 stall"})
	usable(t, s)
	p := startPrometheus(t, s)
	serves(t, s, m, 1, 4, 9, 4)

	t.Run("rules evaluate", func(t *testing.T) { rulesEvaluate(t, p, s) })
	t.Run("names exist", func(t *testing.T) { namesExist(t, p) })
	t.Run("dashboard", func(t *testing.T) { dashboardWorks(t, p) })
	t.Run("doctor", func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for ctx.Err() == nil { // until one of them meets the fault
				complete(ctx, s.URL(), prompt(3, 9), 2, nil)
			}
		}()
		defer func() { stop(); <-ended }()
		eventually(t, 30*time.Second, func(ctx context.Context) error {
			n, err := p.size(ctx, "min_over_time(baton_num_prefill_inflight_queue_reqs[6s]) > 0 and count_over_time(baton_num_prefill_inflight_queue_reqs[6s]) > 4")
			if err == nil && n == 0 {
				err = errors.New("Prometheus has not seen 5 s of it yet")
			}
			return err
		})
		e := examine(t, "--prometheus", p.url, "--window", "6s", "--interval", "1s", "--stuck-after", "3s", "--selector", `job="baton"`)
		want := []string{"stuck-queue@" + s.Decodes[0].HTTP, "stuck-queue@" + s.Prefills[0].HTTP}
		slices.Sort(want)
		if e.status != 1 || !slices.Equal(e.rules(), want) {
			t.Errorf("status %d, found %v, want %v; %s %+v", e.status, e.rules(), want, e.errs, e.report.Doubts)
		}
		if e := examine(t, "--prometheus", p.url, "--window", "6s", "--selector", `job="nobody"`); e.status != 2 || !strings.Contains(e.errs, "no series") {
			t.Errorf("without any series: status %d, %q", e.status, e.errs)
		}
	})
}

// rulesEvaluate waits until every rule has been evaluated on scrapes of every process, without error and, as
// the stack is healthy, without an alert.
func rulesEvaluate(t *testing.T, p prom, s *stack.Stack) {
	var d struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Name, Health, State, LastError string
				LastEvaluation                 time.Time
			}
		}
	}
	all := strings.Count(fileText(t, rulesFile), "- alert:")
	eventually(t, 30*time.Second, func(ctx context.Context) error {
		if n, err := p.size(ctx, "count_over_time(up[1m]) > 2 and up == 1"); err != nil || n != len(s.All()) {
			return fmt.Errorf("%d of %d processes are scraped: %v", n, len(s.All()), err)
		}
		d.Groups = nil
		if err := p.data(ctx, "/api/v1/rules", nil, &d); err != nil {
			return err
		}
		n := 0
		for _, g := range d.Groups {
			for _, r := range g.Rules {
				if r.Health != "ok" || r.LastError != "" {
					return fmt.Errorf("%s: health %s: %s", r.Name, r.Health, r.LastError)
				}
				if r.State != "inactive" {
					t.Errorf("%s is %s on a healthy stack", r.Name, r.State)
				}
				n++
			}
		}
		if n != all || n < 15 {
			return fmt.Errorf("%d of %d rules are loaded", n, all)
		}
		return nil
	})
}

var metricName = regexp.MustCompile(`\b(?:baton_|sglang:)[a-zA-Z0-9_]+`)

// namesExist: every metric that rules and dashboard read is one of a running stack, or documented (a counter with labels has
// no series before its first event; repotest holds the page equal to the code), or one of SGLang's.
func namesExist(t *testing.T, p prom) {
	var live []string
	if err := p.data(t.Context(), "/api/v1/label/__name__/values", nil, &live); err != nil {
		t.Fatal(err)
	}
	documented, sglang := fileText(t, "../../docs/metrics.md"), fileText(t, sglangNames)
	used := metricName.FindAllString(fileText(t, rulesFile)+fileText(t, dashboardFile), -1)
	slices.Sort(used)
	seen := 0
	for _, name := range slices.Compact(used) {
		base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(name, "")
		switch {
		case strings.HasPrefix(name, "sglang:"):
			if !strings.Contains(sglang, "\n"+name+" ") && !strings.Contains(sglang, "\n"+base+" histogram\n") {
				t.Errorf("%s is no metric of SGLang 0.5.23", name)
			}
		case slices.Contains(live, name):
			seen++
		case !strings.Contains(documented, "`"+base+"`"):
			t.Errorf("%s is no metric of Baton's", name)
		}
	}
	if seen < 15 {
		t.Errorf("only %d of Baton's metrics are live", seen)
	}
}

// dashboard is what matters of Grafana's form.
type dashboard struct {
	UID, Title    string
	SchemaVersion int
	Panels        []struct {
		ID                       int
		Type, Title, Description string
		GridPos                  struct{ X, Y, W, H int }
		Datasource               struct{ Type, UID string }
		Targets                  []struct {
			RefID, Expr string
			Datasource  struct{ Type, UID string }
		}
	}
	Templating struct {
		List []struct {
			Name, Type string
		}
	}
}

// dashboardWorks checks the form, and asks Prometheus every query.
func dashboardWorks(t *testing.T, p prom) {
	var d dashboard
	if err := json.Unmarshal([]byte(fileText(t, dashboardFile)), &d); err != nil {
		t.Fatal(err)
	}
	if d.UID == "" || d.Title == "" || d.SchemaVersion < 36 || len(d.Panels) < 20 || len(d.Templating.List) != 2 {
		t.Fatalf("%q %q, schema %d, %d panels, %d variables", d.UID, d.Title, d.SchemaVersion, len(d.Panels), len(d.Templating.List))
	}
	ids, cells := map[int]bool{}, map[[2]int]string{}
	withData := 0
	for _, panel := range d.Panels {
		g := panel.GridPos
		if ids[panel.ID] || panel.Title == "" || g.X < 0 || g.W < 1 || g.H < 1 || g.X+g.W > 24 {
			t.Errorf("panel %d %q: an id twice, no title, or outside the grid: %+v", panel.ID, panel.Title, g)
		}
		ids[panel.ID] = true
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other, taken := cells[[2]int{x, y}]; taken {
					t.Fatalf("panels %q and %q overlap", panel.Title, other)
				}
				cells[[2]int{x, y}] = panel.Title
			}
		}
		if panel.Type == "row" {
			continue
		}
		if len(panel.Targets) == 0 || panel.Description == "" || panel.Datasource.UID != "${datasource}" {
			t.Errorf("panel %q has no queries, no description or a data source of its own", panel.Title)
		}
		for _, q := range panel.Targets {
			if q.RefID == "" || q.Datasource.Type != "prometheus" {
				t.Errorf("panel %q: query %+v", panel.Title, q)
			}
			expr := strings.NewReplacer("$instance", ".*", "$__rate_interval", "20s").Replace(q.Expr)
			n, err := p.size(t.Context(), expr)
			if err != nil {
				t.Errorf("panel %q: %v", panel.Title, err)
			}
			if n > 0 {
				withData++
			}
		}
	}
	if withData < 15 {
		t.Errorf("only %d queries have data on a stack that has served", withData)
	}
}
