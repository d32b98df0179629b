package router

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// says makes the fake answer paths with bodies; the rest is 404.
func (f *fake) says(answers map[string]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.info = func(w http.ResponseWriter, r *http.Request) {
		a, ok := answers[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, a)
	}
}

// restarted brings f out and up again, so that it is asked what it is.
func (b *bed) restarted(fs ...*fake) {
	for _, f := range fs {
		f.setHealth(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	}
	<-time.After(1500 * time.Millisecond)
	for _, f := range fs {
		f.setHealth(nil)
	}
	<-time.After(1500 * time.Millisecond)
	synctest.Wait()
}

var (
	isBaton   = map[string]string{"/server_info": `{"role":"decode","disaggregation_mode":"decode","allow_local":true}`}
	isBatonNo = map[string]string{"/server_info": `{"role":"decode","disaggregation_mode":"decode","allow_local":false}`}
	isSGLang  = map[string]string{"/server_info": `{"disaggregation_mode":"decode","tp_size":1}`, "/version": `{"version":"x"}`}
	isAlone   = map[string]string{"/get_server_info": `{"disaggregation_mode":"null","tp_size":1}`}
	isVLLM    = map[string]string{"/version": `{"version":"0.11.0"}`, "/v1/models": `{"object":"list","data":[]}`}
	isPlain   = map[string]string{"/v1/models": `{"object":"list","data":[{"id":"m"}]}`}
)

func TestKindsAreDetected(t *testing.T) {
	for name, c := range map[string]struct {
		says map[string]string
		want nature
	}{
		"baton":            {isBaton, nature{KindBaton, true}},
		"baton, not local": {isBatonNo, nature{KindBaton, false}},
		"sglang":           {isSGLang, nature{KindSGLang, false}},
		"sglang alone":     {isAlone, nature{KindPlain, false}},
		"sglang null":      {map[string]string{"/server_info": `{"disaggregation_mode":null}`}, nature{KindPlain, false}},
		"vllm":             {isVLLM, nature{KindVLLM, false}},
		"vllm, dev":        {map[string]string{"/server_info": `{"vllm_config":"x"}`}, nature{KindVLLM, false}},
		"plain":            {isPlain, nature{KindPlain, false}},
		"nothing":          {map[string]string{}, nature{}},
		"garbage":          {map[string]string{"/server_info": "<html>", "/version": `"1"`, "/v1/models": `{"data":{}}`}, nature{}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
				if got := b.r.decodes.workers()[0].is(); got != (nature{}) {
					t.Fatalf("a fake that says nothing is %+v", got)
				}
				d[0].says(c.says)
				b.restarted(d[0])
				if got := b.r.decodes.workers()[0].is(); got != c.want {
					t.Errorf("got %+v, want %+v", got, c.want)
				}
				asked := func() int {
					d[0].mu.Lock()
					defer d[0].mu.Unlock()
					return len(d[0].other)
				}
				seen := asked()
				<-time.After(10 * time.Second)
				if asked() != seen {
					t.Error("asked again although it is known")
				}
			})
		})
	}
}

func TestPairs(t *testing.T) {
	kinds := []Kind{KindDetect, KindBaton, KindSGLang, KindVLLM, KindPlain}
	good := map[[2]Kind]bool{
		{KindDetect, KindDetect}: true, {KindDetect, KindBaton}: true, {KindDetect, KindSGLang}: true, {KindBaton, KindDetect}: true,
		{KindSGLang, KindDetect}: true, {KindBaton, KindBaton}: true, {KindSGLang, KindSGLang}: true, {KindVLLM, KindVLLM}: true,
	}
	for _, a := range kinds {
		for _, b := range kinds {
			p, d := &worker{}, &worker{}
			p.nature.Store(&nature{kind: a})
			d.nature.Store(&nature{kind: b})
			if pairs(p, d) != good[[2]Kind{a, b}] {
				t.Errorf("%q with %q: %v", a, b, pairs(p, d))
			}
		}
	}
}

const kvAnswer = `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"h"},"finish_reason":"length"}],` +
	`"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e","remote_block_ids":[1, 2],"remote_host":"h","remote_port":5}}`

// vllm makes a bed of vLLM workers.
func vllm(t *testing.T, c Config, p, d []script, f func(t *testing.T, b *bed, p, d []*fake)) {
	t.Helper()
	inBubble(t, c, p, d, func(t *testing.T, b *bed, p, d []*fake) {
		for _, w := range append(p, d...) {
			w.says(isVLLM)
		}
		b.restarted(append(p, d...)...)
		f(t, b, p, d)
	})
}

func TestVLLM(t *testing.T) {
	vllm(t, Config{}, []script{after(time.Second, say(200, kvAnswer))}, []script{okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		g := b.post(t.Context(), "/v1/chat/completions", `{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true},"max_tokens":50,"min_tokens":9,`+
			`"max_completion_tokens":40,"kv_transfer_params":{"evil":1},"seed":18446744073709551615}`)
		g.ok(t, role+token+last+done)
		pl, dl := p[0].leg(0), d[0].leg(0)
		if gap := dl.at.Sub(pl.at); gap != time.Second {
			t.Errorf("decode was asked %v after prefill", gap)
		}
		for name, want := range map[string]string{
			"stream": "false", "max_tokens": "1", "max_completion_tokens": "1", "stream_options": "", "min_tokens": "", "rid": "", "bootstrap_room": "", "seed": "18446744073709551615",
			kvField: `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`,
		} {
			if string(pl.fields[name]) != want {
				t.Errorf("prefill: %s is %s, want %s", name, pl.fields[name], want)
			}
		}
		for name, want := range map[string]string{
			"stream": "true", "max_tokens": "50", "min_tokens": "9", "max_completion_tokens": "40", "stream_options": `{"include_usage":true}`, "rid": "", "bootstrap_room": "",
			kvField: `{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e","remote_block_ids":[1,2],"remote_host":"h","remote_port":5}`,
		} {
			if string(dl.fields[name]) != want {
				t.Errorf("decode: %s is %s, want %s", name, dl.fields[name], want)
			}
		}
		if id := pl.header.Get("X-Request-Id"); id == "" || id != dl.header.Get("X-Request-Id") {
			t.Errorf("request ids %q and %q", id, dl.header.Get("X-Request-Id"))
		}
		p[0].set(okPrefill) // no KV to fetch: decode computes the prompt
		b.chat()
		if kv, ok := d[0].leg(1).fields[kvField]; ok {
			t.Errorf("made-up %s: %s", kvField, kv)
		}
		if g := b.get("/workers"); !strings.Contains(g.body, `"kind":"vllm"`) {
			t.Errorf("%s", g.body)
		}
	})
}

// Faults of a staged pair.
func TestVLLMFaults(t *testing.T) {
	for name, c := range map[string]struct {
		p, d    script
		status  int
		cause   string
		side    string
		phase   string
		decodes int // legs that decode saw
	}{
		"prefill 500":     {say(500, "boom"), okAnswer, 500, "engine_failed", "prefill", "reading_answer", 0},
		"prefill resets":  {reset, okAnswer, 502, "peer_lost", "prefill", "waiting_for_headers", 0},
		"prefill silent":  {silent, okAnswer, 504, "deadline", "prefill", "waiting_for_headers", 0},
		"prefill garbage": {say(200, "{"), okAnswer, 502, "protocol", "prefill", "reading_answer", 0},
		"prefill's KV":    {say(200, strings.Replace(chatAnswer, "{", `{"kv_transfer_params":"x",`, 1)), say(400, "bad"), 502, "protocol", "prefill", "reading_answer", 0},
		"decode 503":      {say(200, kvAnswer), say(503, "busy"), 503, "unavailable", "decode", "reading_answer", 1},
		"decode silent":   {say(200, kvAnswer), silent, 504, "deadline", "decode", "waiting_for_headers", 1},
	} {
		t.Run(name, func(t *testing.T) {
			vllm(t, Config{MaxRetries: -1}, []script{c.p}, []script{c.d}, func(t *testing.T, b *bed, p, d []*fake) {
				g := b.chat(HeaderTimeout, "2000")
				e := g.fails(t, c.status, c.cause)
				if e.Error.Side != c.side || e.Error.Phase != c.phase || e.Error.Room == "" {
					t.Errorf("the error does not say where: %s", g.body)
				}
				if g.took > 2500*time.Millisecond {
					t.Errorf("took %v", g.took)
				}
				<-time.After(time.Second)
				if n := d[0].count(); n != c.decodes {
					t.Errorf("decode saw %d requests", n)
				}
				if len(p[0].aborts)+len(d[0].aborts) > 0 {
					t.Error("vLLM has no /abort_request")
				}
				for _, w := range []*fake{p[0], d[0]} {
					if w.count() > 0 && c.cause == "deadline" && w.addr[:1] == c.side[:1] && !w.leg(0).closed {
						t.Errorf("%s: the connection is still open", w.addr)
					}
				}
			})
		})
	}
	vllm(t, Config{Policy: PolicyRoundRobin}, []script{say(500, "boom"), say(200, kvAnswer)}, []script{okStream, say(503, "busy")}, func(t *testing.T, b *bed, p, d []*fake) {
		for range 8 {
			b.chatStream().ok(t, role+token+last+done)
		}
	})
}

// Pairs are of one kind, whatever the policy.
func TestMixedFleet(t *testing.T) {
	inBubble(t, Config{Policy: PolicyRoundRobin}, []script{okPrefill, say(200, kvAnswer), okPrefill}, []script{okAnswer, okAnswer, okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		for i, kind := range []map[string]string{isSGLang, isVLLM, isBaton} {
			p[i].says(kind)
			d[(i+2)%3].says(kind) // not in the same order
		}
		b.restarted(append(p, d...)...)
		for range 30 {
			b.chat().ok(t, chatAnswer)
		}
		for i := range 3 {
			if d[i].count() == 0 || p[i].count() == 0 {
				t.Errorf("pair %d got %d and %d requests", i, p[i].count(), d[i].count())
			}
			for j := range d[i].count() {
				l := d[i].leg(j)
				if vllm := l.fields[kvField] != nil; vllm != (i == 0) || !vllm && l.bootHost() != "boot"+string(rune('0'+(i+1)%3)) {
					t.Errorf("d%d got %s", i, l.body)
				}
			}
		}
		d[2].kill() // its prefill worker has no partner left
		synctest.Wait()
		for range 10 {
			b.chat().ok(t, chatAnswer)
		}
	})
}

// SGLang ends every request whose rid begins with the one that an abort names, so its workers never see a client's own.
func TestSGLangRID(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		p[0].says(isSGLang)
		d[0].says(isSGLang)
		b.restarted(p[0], d[0])
		ctx, leave := context.WithTimeout(t.Context(), time.Second)
		defer leave()
		b.post(ctx, "/v1/completions", `{"rid":["a","b"],"prompt":["x","y"]}`)
		synctest.Wait()
		<-time.After(100 * time.Millisecond)
		for _, w := range []*fake{p[0], d[0]} {
			l := w.leg(0)
			if len(l.rid()) != 32 {
				t.Errorf("%s was sent rid %s", w.addr, l.fields["rid"])
			}
			w.mu.Lock()
			if n := len(w.aborts); w == d[0] && (n != 1 || w.aborts[l.rid()+" "+l.room()].IsZero()) {
				t.Errorf("aborts %v, want one of %s in room %s", w.aborts, l.rid(), l.room())
			}
			w.mu.Unlock()
		}
		ended := make(chan got, 1)
		go func() {
			ended <- b.post(t.Context(), "/v1/chat/completions", strings.Replace(chatBody, "{", `{"rid":"mine",`, 1))
		}()
		synctest.Wait()
		b.post(t.Context(), "/abort_request", `{"rid":"mine"}`).ok(t, "{\"aborted\":1}\n")
		(<-ended).fails(t, 499, "aborted")
	})
}

// Plain servers: the only pool, or for when a leg has no worker.
func TestPlainPool(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{okAnswer, okStream, okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		d[1].says(isPlain)
		d[2].says(isPlain)
		b.restarted(d[1], d[2])
		for range 6 {
			b.chat().ok(t, chatAnswer)
		}
		if n := d[1].count() + d[2].count(); n != 0 {
			t.Fatalf("the plain pool got %d requests although there was a pair", n)
		}
		p[0].kill()
		synctest.Wait()
		d[0].set(after(time.Millisecond, okAnswer)) // a real one would wait for the prefill worker, which refuses first
		d[1].set(after(time.Millisecond, say(500, "boom")))
		for range 4 { // with retries within the pool
			b.post(t.Context(), "/v1/chat/completions", strings.Replace(streamBody, "{", `{"rid":"mine","bootstrap_room":7,`, 1)).ok(t, role+token+last+done)
		}
		var l leg1
		if l = d[2].leg(0); l.fields["rid"] != nil || l.fields["bootstrap_room"] != nil || string(l.body) != streamBody || l.header.Get("X-Request-Id") == "" {
			t.Errorf("a plain server was sent %s, %v", l.body, l.header)
		}
		if g := b.get("/health"); g.status != 200 {
			t.Errorf("health %d %s", g.status, g.body)
		}
		d[2].set(sse(role, token, nil))
		g := b.chatStream(HeaderTimeout, "1000")
		if e := g.breaks(t, role+token, "deadline"); e.Error.Peer != "d2:80" || g.took > 1500*time.Millisecond {
			t.Errorf("%s after %v", g.body, g.took)
		}
		<-time.After(time.Second)
		if !d[2].leg(-1).closed || len(d[2].aborts) > 0 {
			t.Errorf("closed %v, aborts %v", d[2].leg(-1).closed, d[2].aborts)
		}
	})
	// It must have the model; a worker that needs a pair is not asked alone.
	inBubble(t, Config{Decodes: []Backend{{URL: "http://x:1", Kind: KindPlain, Models: []string{"z"}}}}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		w := b.net.worker(t, "x:1", okAnswer)
		defer w.kill()
		p[0].kill()
		<-time.After(2 * time.Second)
		b.chat().fails(t, 503, "unavailable")
		if w.count()+d[0].count() != 0 {
			t.Errorf("requests: plain %d, decode %d", w.count(), d[0].count())
		}
		b.post(t.Context(), "/v1/chat/completions", strings.Replace(chatBody, `"m"`, `"z"`, 1)).ok(t, chatAnswer)
	})
	inBubble(t, Config{Decodes: []Backend{{URL: "http://x:1", Kind: KindPlain}}}, nil, nil, func(t *testing.T, b *bed, p, d []*fake) {
		b.chat().fails(t, 503, "unavailable")
		w := b.net.worker(t, "x:1", okAnswer)
		defer w.kill()
		<-time.After(2 * time.Second)
		b.chat().ok(t, chatAnswer)
		if g := b.get("/health"); g.status != 200 {
			t.Errorf("health %d %s", g.status, g.body)
		}
	})
}

// The prefill worker is lost, decode is well: another prefill worker, else decode computes the prompt itself, if that is wanted and it can.
func TestPrefillLostDecodeComputes(t *testing.T) {
	for name, c := range map[string]struct {
		says   map[string]string
		local  bool
		status int
	}{
		"can":      {isBaton, true, 200},
		"cannot":   {isBatonNo, true, 500},
		"unwanted": {isBaton, false, 500},
		"sglang":   {isSGLang, true, 500},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{LocalFallback: c.local}, []script{okPrefill, okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
				for _, w := range []*fake{p[0], p[1], d[0]} {
					w.says(c.says)
				}
				b.restarted(p[0], p[1], d[0])
				bad := after(time.Millisecond, say(500, "boom"))
				p[0].set(bad)
				p[1].set(bad)
				d[0].set(func(w http.ResponseWriter, r *http.Request, l *leg1) {
					if l.fields["bootstrap_room"] != nil {
						silent(w, r, l) // no KV comes
						return
					}
					okAnswer(w, r, l)
				})
				g := b.post(t.Context(), "/v1/chat/completions", strings.Replace(chatBody, "{", `{"rid":"mine",`, 1))
				if g.status != c.status || g.took > time.Second {
					t.Fatalf("%d after %v: %s", g.status, g.took, g.body)
				}
				if p[0].count() != 1 || p[1].count() != 1 {
					t.Errorf("prefill: %d and %d requests; both should be tried first", p[0].count(), p[1].count())
				}
				if c.status == 200 {
					var rid string
					l := d[0].leg(-1)
					if err := json.Unmarshal(l.fields["rid"], &rid); err != nil || rid == "" || l.fields["bootstrap_host"] != nil {
						t.Errorf("decode was sent %s", l.body)
					}
				}
				p[0].kill()
				p[1].kill()
				synctest.Wait()
				if g := b.chat(); c.status == 200 && g.status != 200 || c.status != 200 && g.status != 503 {
					t.Errorf("without any prefill worker: %d %s", g.status, g.body)
				}
				<-time.After(2 * time.Second)
				if g := b.get("/health"); (g.status == 200) != (c.status == 200) {
					t.Errorf("health %d %s", g.status, g.body)
				}
			})
		})
	}
}

func TestKindsAreChecked(t *testing.T) {
	for name, c := range map[string]Config{
		"unknown":       {Prefills: []Backend{{URL: "http://a:1", BootstrapPort: 1}}, Decodes: []Backend{{URL: "http://b:1", Kind: "tgi"}}},
		"plain prefill": {Prefills: []Backend{{URL: "http://a:1", BootstrapPort: 1, Kind: KindPlain}}, Decodes: []Backend{{URL: "http://b:1"}}},
		"no prefill":    {Decodes: []Backend{{URL: "http://b:1", Kind: KindPlain}, {URL: "http://c:1", Kind: KindVLLM}}},
		"no port":       {Prefills: []Backend{{URL: "http://a:1", Kind: KindBaton}}, Decodes: []Backend{{URL: "http://b:1"}}},
	} {
		if r, err := New(c); err == nil {
			r.Close()
			t.Errorf("%s: accepted", name)
		}
	}
}
