package edge

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// keyFile writes lines to a file and opens it.
func keyFile(t *testing.T, lines ...string) (*Keys, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	write(t, path, lines...)
	k, err := OpenKeys(path)
	if err != nil {
		t.Fatal(err)
	}
	return k, path
}

func write(t *testing.T, path string, lines ...string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestNewKey(t *testing.T) {
	a, hash := NewKey()
	b, _ := NewKey()
	if a == b || len(a) < 43 {
		t.Fatalf("keys %q and %q", a, b)
	}
	k, _ := keyFile(t, "me "+hash)
	if got := k.Find(a); got == nil || got.Name != "me" || k.Find(b) != nil {
		t.Fatalf("found %+v", got)
	}
	if CheckName(a) == nil {
		t.Error("a key is taken for a name")
	}
}

func TestParseKeyFile(t *testing.T) {
	a, ha := NewKey()
	b, hb := NewKey()
	c, hc := NewKey()
	k, _ := keyFile(t, "# clients", "", "  team-a  "+ha+" weight=2.5 max-priority=-3 max-inflight=8 per-minute=60 "+hb+"\r", "ops "+strings.ToUpper(hc[7:8])[:0]+hc+" operator")
	one := Key{Name: "team-a", Weight: 2.5, MaxPriority: -3, MaxInflight: 8, PerMinute: 60}
	if got := k.Find(a); got == nil || *got != one || k.Find(b) != got {
		t.Errorf("got %+v", got)
	}
	if got := k.Find(c); got == nil || !got.Operator || got.Weight != 1 || got.MaxPriority < 100 {
		t.Errorf("got %+v", got)
	}
	for _, no := range []string{"", a[:len(a)-1], a + "x", strings.ToUpper(a), ha} {
		if k.Find(no) != nil {
			t.Errorf("%q is somebody's key", no)
		}
	}
}

// What is wrong is told with its line, and no word of the file that may be a secret.
func TestBadKeyFiles(t *testing.T) {
	key, h := NewKey()
	for text, want := range map[string]string{
		"":                                      "there is no key",
		"# only this":                           "there is no key",
		"a":                                     "line 1: a has no hash",
		"a " + key:                              "line 1: there is something that is neither",
		key + " " + h:                           "line 1: a name has",
		"a b " + h:                              "line 1: there is something that is neither",
		"\na sha256:abc":                        "line 2: a hash is sha256: and 64",
		"a " + h[:len(h)-1]:                     "line 1: a hash is",
		"a " + h + "\nb " + h:                   "line 2: this hash is there already, for a",
		"a " + h + "\na " + h[:10] + h[9:]:      "line 2: a hash is",
		"a " + h + " weight=0":                  "weight must be in",
		"a " + h + " weight=NaN":                "weight must be in",
		"a " + h + " max-inflight=0":            "max-inflight must be a whole number in [1,",
		"a " + h + " per-minute=-1":             "per-minute must be",
		"a " + h + " max-priority=101":          "max-priority must be",
		"a " + h + " per-minute=1 per-minute=2": "an attribute is there twice",
		"a " + h + " operator=no":               "operator takes no value",
		"a " + h + " quota=1":                   "neither a hash nor",
		`"a" ` + h:                              "line 1: a name has",
		strings.Repeat("a", 65) + " " + h:       "line 1: a name has",
	} {
		_, err := parseRing([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %q", text, err, want)
		}
		if err != nil && (strings.Contains(err.Error(), key[6:]) || strings.Contains(err.Error(), h[7:20])) {
			t.Errorf("%q: the error shows what may be a secret: %v", text, err)
		}
	}
	_, h2 := NewKey()
	if _, err := parseRing([]byte("a " + h + "\na " + h2)); err == nil || !strings.Contains(err.Error(), "the name a is there twice") {
		t.Error(err)
	}
	if _, err := OpenKeys(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func TestLimits(t *testing.T) {
	key, h := NewKey()
	k, _ := keyFile(t, "a "+h+" max-inflight=2 per-minute=3")
	now := time.Now().Add(time.Hour)
	k.now = func() time.Time { return now }
	begin := func(reason string, after time.Duration) func() {
		t.Helper()
		end, err := k.Begin(k.Find(key))
		var limit *LimitError
		switch {
		case reason == "" && err != nil:
			t.Fatal(err)
		case reason != "" && (!errors.As(err, &limit) || limit.Reason != reason || limit.After != after || limit.Name != "a"):
			t.Fatalf("got %+v; want %s, %v", err, reason, after)
		}
		return end
	}
	one, two := begin("", 0), begin("", 0)
	begin(ReasonInflight, time.Second) // takes no token
	one()
	three := begin("", 0)
	two()
	begin(ReasonRate, 20*time.Second)
	now = now.Add(20 * time.Second)
	four := begin("", 0)
	if n := k.Inflight("a"); n != 2 {
		t.Fatalf("%d in flight", n)
	}
	// A change keeps what is there, and takes the new limits.
	text := []byte("a " + h + " max-inflight=3")
	if err := k.apply([][]byte{text}); err != nil {
		t.Fatal(err)
	}
	five := begin("", 0)
	begin(ReasonInflight, time.Second)
	three()
	four()
	five()
	if n := k.Inflight("a"); n != 0 {
		t.Fatalf("%d in flight at the end", n)
	}
}

// A client that is taken off the list ends what it has, and nothing of it is kept then; one that comes back before finds its requests counted.
func TestKeysComeAndGo(t *testing.T) {
	a, ha := NewKey()
	_, hb := NewKey()
	k, _ := keyFile(t, "a "+ha+" max-inflight=1")
	apply := func(line string) {
		t.Helper()
		if err := k.apply([][]byte{[]byte(line)}); err != nil {
			t.Fatal(err)
		}
	}
	was := k.Find(a)
	end, err := k.Begin(was)
	if err != nil {
		t.Fatal(err)
	}
	apply("b " + hb)
	if k.Find(a) != nil || k.Inflight("a") != 1 {
		t.Fatal("a is still listed, or its request is forgotten")
	}
	apply("a " + ha + " max-inflight=1")
	if _, err := k.Begin(k.Find(a)); err == nil {
		t.Fatal("coming back has made room")
	}
	apply("b " + hb)
	end()
	late, err := k.Begin(was) // checked before the change
	if err != nil {
		t.Fatal(err)
	}
	late()
	if len(k.use) != 1 || k.use["b"] == nil {
		t.Fatalf("kept: %v", k.use)
	}
	defer func() {
		if recover() == nil {
			t.Error("ending twice is not noticed")
		}
	}()
	late()
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, ha := NewKey()
		b, hb := NewKey()
		k, path := keyFile(t, "a "+ha)
		var mu sync.Mutex
		var told []string
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			Watch(ctx, time.Second, k.Watched(), func(err error) {
				mu.Lock()
				defer mu.Unlock()
				told = append(told, fmt.Sprint(err))
			})
		}()
		step := func(what string, findA, findB bool, words ...string) {
			t.Helper()
			<-time.After(3 * time.Second)
			mu.Lock()
			defer mu.Unlock()
			if (k.Find(a) != nil) != findA || (k.Find(b) != nil) != findB {
				t.Fatalf("%s: a %v, b %v", what, k.Find(a), k.Find(b))
			}
			if len(told) != len(words) {
				t.Fatalf("%s: told %q", what, told)
			}
			for i := range words {
				if !strings.Contains(told[i], words[i]) {
					t.Fatalf("%s: told %q; want %q", what, told, words)
				}
			}
			told = nil
		}
		<-time.After(500 * time.Millisecond) // never write while it reads
		step("at first", true, false)
		write(t, path, "a "+ha, "b "+hb)
		step("more", true, true, "<nil>")
		write(t, path, "b "+hb, "a sha")
		step("broken", true, true, "line 2: ")
		write(t, path, "a "+ha, "b "+hb)
		step("as before", true, true, "<nil>")
		// Half a file that looks whole, for less than two readings.
		write(t, path, "a "+ha)
		<-time.After(time.Second)
		if k.Find(b) == nil {
			t.Fatal("half a file was taken")
		}
		write(t, path, "a "+ha, "b "+hb)
		step("whole again", true, true)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		step("gone", true, true, "no such file")
		write(t, path, "b "+hb)
		step("less", false, true, "<nil>")
		cancel()
		<-done
	})
}
