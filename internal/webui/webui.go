// Package webui is the page that a router shows of itself: plain HTML, CSS and JavaScript, embedded, without a framework and without
// anything from elsewhere. The page holds no secret and no data; its script asks the router for both the state (/ui/events) and answers
// (/v1/chat/completions), with the key that its user gave it.
package webui

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"net/http"
	"strings"
	"time"
)

// Path is where the page is; its parts and the stream of states are below it.
const Path = "/ui"

// EventsPath is where the script expects the stream of states; it is not this package's to serve.
const EventsPath = Path + "/events"

//go:embed assets
var assets embed.FS

// policy lets the page load its own three files and talk to its own origin, and nothing else. Trusted types have the browser itself
// refuse any attempt to put text in as markup.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
	"require-trusted-types-for 'script'; trusted-types 'none'"

// file is one part of the page.
type file struct {
	body  []byte
	kind  string
	etag  string
	named string
}

// Handler serves the page at Path and its parts below it; anything else there is not found.
func Handler() http.Handler {
	files := map[string]file{}
	for name, f := range map[string]struct{ path, kind string }{
		"index.html": {Path, "text/html; charset=utf-8"}, "app.js": {Path + "/app.js", "text/javascript; charset=utf-8"},
		"style.css": {Path + "/style.css", "text/css; charset=utf-8"}, "icon.svg": {Path + "/icon.svg", "image/svg+xml"},
	} {
		body, err := fs.ReadFile(assets, "assets/"+name)
		if err != nil {
			panic("webui: " + err.Error()) // it is embedded
		}
		sum := sha256.Sum256(body)
		files[f.path] = file{body: body, kind: f.kind, etag: `"` + hex.EncodeToString(sum[:8]) + `"`, named: name}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		f, ok := files[strings.TrimSuffix(req.URL.Path, "/")]
		if !ok {
			http.NotFound(w, req)
			return
		}
		h := w.Header()
		h.Set("Content-Type", f.kind)
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-cache") // but with the tag an unchanged part is not sent again
		h.Set("ETag", f.etag)
		http.ServeContent(w, req, f.named, time.Time{}, bytes.NewReader(f.body))
	})
}
