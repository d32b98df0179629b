package webui_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/router"
	"github.com/baton-pd/baton/internal/webui"
	"github.com/baton-pd/baton/internal/webui/browser"
)

// Without spaces: it serves as a rid, too.
const hostile = `<img/src=x/onerror="window.pwned=1"></div><script>window.pwned=1</script>`

// model is a plain server whose answers are what the question says: "hang" never ends, anything else is answered with hostile text.
func model(t *testing.T, left chan<- struct{}) *httptest.Server {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch req.URL.Path {
		case "/v1/models":
			_, _ = fmt.Fprintf(w, `{"object":"list","data":[{"id":%q}]}`, "m<b>")
			return
		case "/v1/chat/completions":
		default:
			_, _ = io.WriteString(w, "{}")
			return
		}
		var body struct {
			Messages []struct{ Content string }
		}
		if err := json.NewDecoder(req.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		say := func(piece, finish string) {
			var end any
			if finish != "" {
				end = finish
			}
			raw, err := json.Marshal(map[string]any{"choices": []any{map[string]any{"index": 0, "delta": map[string]string{"content": piece}, "finish_reason": end}}})
			if err != nil {
				t.Error(err)
			}
			_, _ = fmt.Fprintf(w, "data: %s\n\n", raw)
			w.(http.Flusher).Flush()
		}
		if n := len(body.Messages); n > 0 && body.Messages[n-1].Content == "hang" {
			say("one", "")
			<-req.Context().Done()
			left <- struct{}{}
			return
		}
		say(hostile, "")
		say("", "stop")
		_, _ = io.WriteString(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n")
	}))
	t.Cleanup(s.Close)
	return s
}

// keyFile is a file with an operator's and a client's key.
func keyFile(t *testing.T) (keys *edge.Keys, operator, client string) {
	t.Helper()
	operator, a := edge.NewKey()
	client, b := edge.NewKey()
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, []byte("boss "+a+" operator\nalice "+b+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	keys, err := edge.OpenKeys(path)
	if err != nil {
		t.Fatal(err)
	}
	return keys, operator, client
}

// TestPageWithKeys: the page asks for a key; with a client's it shows that client's requests and its chat, with an operator's everything. Text of models
// and clients is text, and Stop ends the request at its worker.
func TestPageWithKeys(t *testing.T) {
	if _, err := browser.Find(); errors.Is(err, browser.ErrMissing) {
		t.Skip("chromium is needed (make testdeps installs it): the page is not tested")
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	left := make(chan struct{}, 1)
	backend := model(t, left)
	keys, operator, client := keyFile(t)
	r, err := router.New(router.Config{Decodes: []router.Backend{{URL: backend.URL, Kind: router.KindPlain}}, Keys: keys})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(r.Handler())
	t.Cleanup(srv.Close)
	t.Cleanup(r.Close)
	b, err := browser.Start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	x := &site{t: t, b: b, ctx: ctx}
	x.size(1280, 900, false)
	if err := b.Open(ctx, srv.URL+webui.Path); err != nil {
		t.Fatal(err)
	}
	give := func(key string) {
		t.Helper()
		x.until("!document.getElementById('ask').hidden")
		x.eval(fmt.Sprintf("document.getElementById('key').value = %q; document.getElementById('ask').requestSubmit()", key), nil)
	}
	say := func(text string) {
		t.Helper()
		x.eval(fmt.Sprintf("document.getElementById('text').value = %q; document.getElementById('say').requestSubmit()", text), nil)
	}
	give("wrong")
	x.until("document.getElementById('askwhy').textContent.includes('does not know')")
	x.shot("key")
	give(client)
	x.until("document.getElementById('ask').hidden && document.getElementById('link').textContent === 'live'")

	say("hello")
	x.until("document.querySelector('.note') && document.querySelector('.req .chip.ok')")
	var said string
	x.eval("document.querySelector('.turn.assistant').textContent", &said)
	if said != hostile {
		t.Errorf("the page shows %q, want %q", said, hostile)
	}
	if note := x.text(".note"); !strings.Contains(note, "2 tokens") || !strings.HasPrefix(note, "stop") {
		t.Errorf("the note says %q", note)
	}
	x.shot("chat")

	say("hang")
	x.until("[...document.querySelectorAll('.turn.assistant')].at(-1).textContent === 'one'")
	x.eval("document.getElementById('stop').click()", nil)
	select {
	case <-left:
	case <-ctx.Done():
		t.Fatal("the worker was not released")
	}
	x.until("document.getElementById('stop').disabled && [...document.querySelectorAll('.req .chip')].some((e) => e.textContent === 'client gone')")

	// Another client's requests, and what it calls them, are for operators only.
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, srv.URL+"/v1/chat/completions", strings.NewReader(fmt.Sprintf(`{"model":%q,"rid":%q,"messages":[],"stream":true}`, hostile, hostile)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+operator)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	say("again")
	x.until("document.querySelectorAll('.req').length === 3 && document.querySelectorAll('.req .chip.ok').length === 2")
	var hidden bool
	x.eval("document.getElementById('h-workers').parentElement.hidden && document.querySelectorAll('.worker').length === 0", &hidden)
	if !hidden {
		t.Error("a client's key shows the workers")
	}
	var key string
	x.eval("document.documentElement.outerHTML", &key)
	if strings.Contains(key, client) {
		t.Error("the key is in the page")
	}

	x.eval("document.getElementById('forget').click()", nil)
	x.until("!document.getElementById('ask').hidden && document.getElementById('text').value === ''")
	give(operator)
	x.until("document.querySelectorAll('.req').length === 4 && document.querySelectorAll('.worker.up').length === 1")
	x.eval("for (const b of document.querySelectorAll('.req > button')) b.click()", nil)
	x.until("document.querySelectorAll('.more').length === 4")
	if all := x.text("#requests"); !strings.Contains(all, hostile) {
		t.Errorf("the client's names are not shown: %s", all)
	}
	var pwned bool
	x.eval("window.pwned === 1 || document.querySelectorAll('img').length > 0", &pwned)
	if pwned {
		t.Error("text became markup")
	}
	var refused bool
	x.eval("(() => { try { document.createElement('div').innerHTML = '<b>x</b>'; return false; } catch (e) { return true; } })()", &refused)
	if !refused {
		t.Error("the page's policy allows text to become markup")
	}
}
