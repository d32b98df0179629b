package webui_test

import (
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/webui"
)

// TestHandler: the page's parts, their kinds and their policy; nothing of it is inline or from elsewhere.
func TestHandler(t *testing.T) {
	h := webui.Handler()
	get := func(path string, header ...string) *httptest.ResponseRecorder {
		req := httptest.NewRequest(http.MethodGet, path, nil)
		for i := 0; i < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		return w
	}
	inline := regexp.MustCompile(`(?i)\son\w+\s*=|\sstyle\s*=|<style|javascript:|<script(?: defer)?>`)
	for path, kind := range map[string]string{"/ui": "text/html", "/ui/": "text/html", "/ui/app.js": "text/javascript", "/ui/style.css": "text/css", "/ui/icon.svg": "image/svg+xml"} {
		w := get(path)
		csp := w.Header().Get("Content-Security-Policy")
		if w.Code != http.StatusOK || !strings.HasPrefix(w.Header().Get("Content-Type"), kind) || !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") ||
			w.Header().Get("X-Content-Type-Options") != "nosniff" || w.Body.Len() < 100 {
			t.Errorf("%s: %d %v", path, w.Code, w.Header())
		}
		body := w.Body.String()
		if n := strings.Count(body, "http://") + strings.Count(body, "https://"); n > strings.Count(body, "http://www.w3.org/2000/svg") {
			t.Errorf("%s names something elsewhere", path)
		}
		if m := inline.FindString(body); kind == "text/html" && m != "" {
			t.Errorf("%s has %q, which the policy refuses", path, m)
		}
		for _, sink := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("} {
			if strings.Contains(body, sink) {
				t.Errorf("%s uses %s", path, sink)
			}
		}
		if again := get(path, "If-None-Match", w.Header().Get("ETag")); again.Code != http.StatusNotModified {
			t.Errorf("%s again: %d", path, again.Code)
		}
	}
	for _, path := range []string{"/ui/none", "/ui/index.html", "/ui/../webui.go"} {
		if w := get(path); w.Code != http.StatusNotFound {
			t.Errorf("%s: %d", path, w.Code)
		}
	}
}
