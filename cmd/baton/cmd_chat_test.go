package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge/edgetest"
)

// chatServer answers each chat with its number, in two pieces and a finish if whole, and keeps what it was asked.
type chatServer struct {
	whole bool

	mu    sync.Mutex
	chats [][]string // contents of each request's messages
	keys  []string
}

func (s *chatServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keys = append(s.keys, r.Header.Get("Authorization"))
	if r.URL.Path == "/v1/models" {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
		return
	}
	var body struct {
		Model    string
		Messages []struct{ Content string }
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body.Model != "m" || r.URL.Path != "/v1/chat/completions" {
		http.Error(w, "not a chat with m", http.StatusBadRequest)
		return
	}
	var said []string
	for _, m := range body.Messages {
		said = append(said, m.Content)
	}
	s.chats = append(s.chats, said)
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"answer \"}}]}\n\n")
	fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%d\"}}]}\n\n", len(s.chats))
	if s.whole {
		fmt.Fprint(w, "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")
	}
}

func runChat(t *testing.T, s *chatServer, typed string, args ...string) (string, error) {
	t.Helper()
	server := httptest.NewServer(s)
	defer server.Close()
	defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	root, out := newRoot(), &bytes.Buffer{}
	root.SetIn(strings.NewReader(typed))
	root.SetOut(out)
	root.SetArgs(append([]string{"chat", "--url", server.URL}, args...))
	err := root.Execute()
	return out.String(), err
}

func TestChatOnce(t *testing.T) {
	t.Setenv(keyEnv, "secret")
	s := &chatServer{whole: true}
	out, err := runChat(t, s, "", "--system", "be short", "say", "hello")
	if err != nil || out != "answer 1\n" {
		t.Errorf("it printed %q, %v", out, err)
	}
	if len(s.chats) != 1 || !slices.Equal(s.chats[0], []string{"be short", "say hello"}) {
		t.Errorf("it asked %q", s.chats)
	}
	for _, k := range s.keys {
		if k != "Bearer secret" {
			t.Errorf("a request with the key %q", k)
		}
	}
}

func TestChatConversation(t *testing.T) {
	s := &chatServer{whole: true}
	if out, err := runChat(t, s, "one\ntwo\n\nnot sent\n"); err != nil || !strings.Contains(out, "answer 2\n") {
		t.Errorf("it printed %q, %v", out, err)
	}
	want := [][]string{{"one"}, {"one", "answer 1", "two"}}
	if !slices.EqualFunc(s.chats, want, slices.Equal[[]string]) {
		t.Errorf("it asked %q, not %q", s.chats, want)
	}
}

func TestChatStreamWithoutFinish(t *testing.T) {
	if out, err := runChat(t, &chatServer{}, "", "hello"); err == nil || !strings.Contains(err.Error(), "without a finish") {
		t.Errorf("it printed %q, %v", out, err)
	}
}

// A router with a certificate of a CA of its own is trusted by name of that CA only, and may want a certificate, too.
func TestChatOverTLS(t *testing.T) {
	a, other := edgetest.NewAuthority(t), edgetest.NewAuthority(t)
	a.Leaf("router", "", time.Hour)
	a.Leaf("me", "me.example", time.Hour)
	server := httptest.NewUnstartedServer(&chatServer{whole: true})
	server.TLS = a.Own("router").ServerTLS(a.Trust())
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	server.StartTLS()
	defer server.Close()
	own := []string{"--tls-cert", a.File("me.pem"), "--tls-key", a.File("me.key")}
	for want, args := range map[string][]string{
		"":                               append([]string{"--tls-ca", a.File("ca.pem")}, own...),
		"certificate required":           {"--tls-ca", a.File("ca.pem")},
		"unknown authority":              append([]string{"--tls-ca", other.File("ca.pem")}, own...),
		"--tls-cert and --tls-key: open": {"--tls-cert", a.File("none"), "--tls-key", a.File("none")},
	} {
		var out bytes.Buffer
		chat := func() error {
			root := newRoot()
			root.SetOut(&out)
			root.SetArgs(append([]string{"chat", "--url", server.URL, "hello"}, args...))
			return root.ExecuteContext(t.Context())
		}
		err := chat()
		for i := 0; i < 20 && edgetest.Unheard(err); i++ {
			err = chat()
		}
		if want == "" && (err != nil || !strings.Contains(out.String(), "answer 1")) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v: %v, %q; want %q", args, err, out.String(), want)
		}
	}
}
