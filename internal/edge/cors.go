package edge

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/baton-pd/baton/internal/httpbody"
	"github.com/baton-pd/baton/internal/openai"
)

// CORS says which pages of other origins may use the router from a browser. The zero CORS lets none.
type CORS struct {
	// Origins are "https://chat.example.com" and the like, or "*" for all.
	Origins []string
	// Credentials lets browsers send cookies and client certificates, for gateways before the router that want them. The router's own
	// keys are none of these. Not with "*".
	Credentials bool
}

const (
	corsMethods = "GET, POST, DELETE"
	corsExposed = "X-Request-Id, Retry-After, X-Should-Retry, X-Baton-Room"
	corsMaxAge  = "600" // seconds
	// maxAsked is how long a preflight's list of headers may be, in bytes.
	maxAsked = 2048
)

// Validate names what is wrong.
func (c CORS) Validate() error {
	for _, o := range c.Origins {
		if o == "*" {
			if c.Credentials {
				return errors.New("CORS: with credentials the origins must be named; * would let every page act for its visitor")
			}
			continue
		}
		u, err := url.Parse(o)
		if err != nil || u.Scheme == "" || u.Host == "" || u.Scheme+"://"+u.Host != o || strings.Contains(o, "*") {
			return fmt.Errorf("CORS: origin %q: want scheme://host or scheme://host:port, or *", o)
		}
	}
	if c.Credentials && len(c.Origins) == 0 {
		return errors.New("CORS: credentials without an origin")
	}
	return nil
}

func (c CORS) allows(origin string) bool {
	return slices.Contains(c.Origins, origin) || slices.Contains(c.Origins, "*")
}

// Wrap answers preflights and marks next's answers for the origins that are allowed. Pages of others can not read answers, which browsers
// see to, and can not cause anything either: their POST is refused, unless it comes from a browser that says nothing
// of where it comes from. refused is told of that.
func (c CORS) Wrap(next http.Handler, refused func(Refusal)) http.Handler {
	cross := http.NewCrossOriginProtection()
	for _, o := range c.Origins {
		if o != "*" {
			_ = cross.AddTrustedOrigin(o) // Validate has been there
		}
	}
	all := slices.Contains(c.Origins, "*")
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		origin := req.Header.Get("Origin")
		if origin == "" && req.Header.Get("Sec-Fetch-Site") == "" { // no browser
			next.ServeHTTP(w, req)
			return
		}
		if len(c.Origins) > 0 {
			c.mark(w.Header(), origin)
		}
		if req.Method == http.MethodOptions && req.Header.Get("Access-Control-Request-Method") != "" {
			c.preflight(w, req, origin)
			return
		}
		if !all && cross.Check(req) != nil {
			arrived := time.Now()
			httpbody.Drain(w, req)
			e := openai.NewError(http.StatusForbidden, codeForbidden, "Origin", "pages of origin %.128q may not use this router; --cors-origin names those that may", origin)
			refused(Refusal{req, ReasonOrigin, "", arrived, w.Header(), e})
			openai.WriteError(w, e)
			return
		}
		next.ServeHTTP(w, req)
	})
}

// mark lets the page read the answer.
func (c CORS) mark(h http.Header, origin string) {
	h.Add("Vary", "Origin")
	if !c.allows(origin) {
		return
	}
	if slices.Contains(c.Origins, "*") {
		origin = "*"
	}
	h.Set("Access-Control-Allow-Origin", origin)
	h.Set("Access-Control-Expose-Headers", corsExposed)
	if c.Credentials {
		h.Set("Access-Control-Allow-Credentials", "true")
	}
}

// preflight says what the page may ask for: any header, by its name, for "*" does not cover Authorization.
func (c CORS) preflight(w http.ResponseWriter, req *http.Request, origin string) {
	if !c.allows(origin) {
		openai.WriteError(w, openai.NewError(http.StatusForbidden, codeForbidden, "Origin",
			"pages of origin %.128q may not use this router; --cors-origin names those that may", origin))
		return
	}
	h := w.Header()
	h.Add("Vary", "Access-Control-Request-Headers")
	h.Set("Access-Control-Allow-Methods", corsMethods)
	if asked := strings.Join(req.Header.Values("Access-Control-Request-Headers"), ","); asked != "" && len(asked) <= maxAsked {
		h.Set("Access-Control-Allow-Headers", asked)
	}
	h.Set("Access-Control-Max-Age", corsMaxAge)
	w.WriteHeader(http.StatusNoContent)
}

// IsCORS reports whether a response header is the browser-facing side's business: what a worker says of it is about itself.
func IsCORS(name string) bool { return strings.HasPrefix(name, "Access-Control-") }
