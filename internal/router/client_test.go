package router

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// An error that comes late, after the time that its own end gave to earlier writes (a busy
// machine), still reaches the client.
func TestLateErrorIsWritten(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		cl := newClient(w)
		if err := cl.ctl.SetWriteDeadline(time.Now().Add(-time.Second)); err != nil {
			t.Error(err)
		}
		cl.fail(routerFailure(room.CodeAborted, false, "late"))
	}))
	defer srv.Close()
	defer http.DefaultClient.CloseIdleConnections()
	res, err := http.Get(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil || !strings.Contains(string(body), `"cause":"aborted"`) {
		t.Errorf("status %d, body %q, error %v", res.StatusCode, body, err)
	}
}
