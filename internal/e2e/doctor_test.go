package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/doctor"
	"github.com/baton-pd/baton/internal/stack"
)

// examined is how `baton doctor` ended.
type examined struct {
	status int
	report doctor.Report
	errs   string
}

// rules lists the findings as rule@target, sorted.
func (e examined) rules() (out []string) {
	for _, f := range e.report.Findings {
		out = append(out, f.Rule+"@"+f.Target)
	}
	slices.Sort(out)
	return out
}

// examine runs `baton doctor --json`.
func examine(t *testing.T, args ...string) examined {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), 60*time.Second)
	defer stop()
	cmd := exec.CommandContext(ctx, binaryRace, append([]string{"doctor", "--json"}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	e := examined{errs: errs.String(), status: cmd.ProcessState.ExitCode()}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("doctor: %v", err)
	}
	if out.Len() > 0 {
		if err := json.Unmarshal(out.Bytes(), &e.report); err != nil {
			t.Fatalf("doctor %v: %v\n%s%s", args, err, out.String(), errs.String())
		}
	}
	return e
}

// watch are the flags for a short look at a stack.
func watch(s *stack.Stack) []string {
	args := []string{"--window", "4s", "--interval", "250ms", "--stuck-after", "3s"}
	for _, p := range s.All() {
		args = append(args, "--metrics", p.Name+"="+p.URL())
	}
	return args
}

// TestDoctor: a stack that serves is healthy; the same stack with a transfer that never ends is not, and both
// sides of it are named; what does not answer can not be told.
func TestDoctor(t *testing.T) {
	// Each request of one chunk writes twice at most; the fifth write and all after it wait for ever.
	s, m := startSim(t, simSetup{transport: "tcp", model: "layers=2", faults: "post nth=5 stall"})
	usable(t, s)
	serves(t, s, m, 1, 1, 9, 4)

	t.Run("healthy while it serves", func(t *testing.T) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			serves(t, s, m, 50, 1, 9, 4)
		}()
		e := examine(t, watch(s)...)
		<-done
		if e.status != 0 || e.report.Verdict != doctor.Healthy || len(e.report.Targets) != 3 {
			t.Errorf("status %d, found %v, doubts %v", e.status, e.rules(), e.report.Doubts)
		}
		for _, ta := range e.report.Targets {
			if ta.Engine != doctor.EngineBaton || ta.Scrapes < 10 || ta.Version == "" {
				t.Errorf("target %+v", ta)
			}
		}
	})
	dir := t.TempDir()
	t.Run("stuck", func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for ctx.Err() == nil { // until one of them meets the fault
				complete(ctx, s.URL(), prompt(3, 9), 2, nil)
			}
		}()
		defer func() { stop(); <-ended }()
		eventually(t, settleTime, func(ctx context.Context) error {
			n, err := metric(ctx, s.Decodes[0], "baton_num_decode_transfer_queue_reqs")
			if err == nil && n != 1 {
				err = errors.New("no request is stuck yet")
			}
			return err
		})
		e := examine(t, append(watch(s), "--save", dir)...)
		want := []string{"stuck-queue@decode-0", "stuck-queue@prefill-0"}
		if e.status != 1 || !slices.Equal(e.rules(), want) {
			t.Errorf("status %d, found %v, want %v; doubts %v", e.status, e.rules(), want, e.report.Doubts)
		}
		for _, f := range e.report.Findings {
			if f.Severity != doctor.Critical || len(f.Evidence) == 0 || f.Cause == "" || f.Action == "" {
				t.Errorf("finding %+v", f)
			}
		}
	})
	t.Run("the same from saved scrapes", func(t *testing.T) {
		files, err := filepath.Glob(filepath.Join(dir, "*.prom"))
		if err != nil || len(files) != 3 {
			t.Fatalf("%v, %v", files, err)
		}
		args := []string{"--stuck-after", "3s"}
		for _, f := range files {
			args = append(args, "--scrape", f)
		}
		if e := examine(t, args...); e.status != 1 || len(e.report.Findings) != 2 {
			t.Errorf("status %d, found %v", e.status, e.rules())
		}
		if e := examine(t, append(args, "--stuck-after", "1m")...); e.status != 2 || len(e.report.Doubts) == 0 {
			t.Errorf("4 s are enough for a minute: status %d, found %v", e.status, e.rules())
		}
	})
	t.Run("nobody answers", func(t *testing.T) {
		addr, err := stack.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		e := examine(t, "--metrics", "http://"+addr, "--window", "300ms", "--interval", "100ms", "--stuck-after", "200ms")
		if e.status != 2 || e.report.Verdict != doctor.Unknown || len(e.report.Doubts) != 1 {
			t.Errorf("status %d: %+v", e.status, e.report)
		}
	})
	t.Run("wrong usage", func(t *testing.T) {
		for _, args := range [][]string{{}, {"--metrics", "x"}, {"--scrape", "nowhere"}, {"--metrics", "http://a", "--scrape", "b"}, {"--probe", "a:1", "--probe-wire", "tin-can"},
			{"--scrape", filepath.Join(dir, "router.prom"), "--version", "nobody=1.2.3"}, {"--scrape", filepath.Join(dir, "router.prom"), "--window", "0s"}} {
			if e := examine(t, args...); e.status != 2 || e.errs == "" {
				t.Errorf("%v: status %d, %q", args, e.status, e.errs)
			}
		}
	})
}

// TestDoctorProbe asks real prefill workers: a good one, with either transport, at work or not; one that
// another build's decode worker can not use; one that is stopped; one that is gone.
func TestDoctorProbe(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		s, m := startSim(t, simSetup{transport: transport, model: "layers=2"})
		usable(t, s)
		boot := s.Prefills[0].Bootstrap
		e := examine(t, "--probe", boot, "--probe-timeout", "1s", "--probe-as", s.Decodes[0].URL())
		if e.status != 0 || len(e.report.Probes) != 1 || len(e.report.Probes[0].Steps) != 6 {
			t.Errorf("%s: status %d, %+v %s", transport, e.status, e.report, e.errs)
		}
		if e = examine(t, "--probe", boot, "--probe-timeout", "1s"); e.status != 0 {
			t.Errorf("%s: without --probe-as status %d, %+v", transport, e.status, e.report)
		}
		serves(t, s, m, 1, 4, 40, 4) // it disturbs nobody
		waitIdle(t, s, settleTime)
		if transport == "shm" {
			continue
		}
		t.Run("another build", func(t *testing.T) {
			other, _ := startSim(t, simSetup{transport: "tcp", model: "layers=3"})
			e := examine(t, "--probe", boot, "--probe-timeout", "1s", "--probe-as", other.Decodes[0].URL())
			if e.status != 1 || !slices.Equal(e.rules(), []string{"probe-mismatch@" + boot}) || !strings.Contains(e.report.Findings[0].Evidence[0], "differs") {
				t.Errorf("status %d, found %+v", e.status, e.report.Findings)
			}
		})
		t.Run("stopped", func(t *testing.T) {
			if err := s.Prefills[0].Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Prefills[0].Signal(syscall.SIGCONT) }()
			e := examine(t, "--probe", boot, "--probe-timeout", "500ms")
			if e.status != 2 || len(e.report.Doubts) != 1 {
				t.Errorf("status %d, %+v", e.status, e.report)
			}
		})
		t.Run("gone", func(t *testing.T) {
			s.Prefills[0].Kill()
			if e := examine(t, "--probe", boot, "--probe-timeout", "500ms"); e.status != 2 || !strings.Contains(e.report.Doubts[0].Text, "refused") {
				t.Errorf("status %d, %+v", e.status, e.report)
			}
		})
	}
}

// TestDoctorText: people get the same as a page of text.
func TestDoctorText(t *testing.T) {
	cmd := exec.Command(binary, "doctor", "--scrape", "../doctor/testdata/baton-stalled.prom", "--stuck-after", "3s")
	out, err := cmd.Output()
	if err == nil || cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("status %v", err)
	}
	for _, want := range []string{"CRITICAL  decode-0  [stuck-queue]", "evidence", "likely", "do  ", "2 findings"} {
		if !bytes.Contains(out, []byte(want)) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if _, err := os.Stat("../../docs/doctor.md"); err != nil {
		t.Error(err)
	}
}
