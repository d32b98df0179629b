package main

import (
	"reflect"
	"testing"

	"github.com/baton-pd/baton/internal/router"
)

func TestRouterWorkerFlags(t *testing.T) {
	for _, c := range []struct {
		flag, value string
		want        router.Backend
	}{
		{"prefill", "http://a:1,8998", router.Backend{URL: "http://a:1", BootstrapHost: "a", BootstrapPort: 8998}},
		{"prefill", "http://a:1,b:2,kind=sglang,zone=z", router.Backend{URL: "http://a:1", BootstrapHost: "b", BootstrapPort: 2, Kind: router.KindSGLang, Zone: "z"}},
		{"prefill", "http://a:1,kind=vllm,model=m", router.Backend{URL: "http://a:1", Kind: router.KindVLLM, Models: []string{"m"}}},
		{"decode", "http://a:1/", router.Backend{URL: "http://a:1"}},
		{"decode", "http://a:1,kind=plain", router.Backend{URL: "http://a:1", Kind: router.KindPlain}},
	} {
		parse := parseDecode
		if c.flag == "prefill" {
			parse = parsePrefill
		}
		if b, err := parse(c.value); err != nil || !reflect.DeepEqual(b, c.want) {
			t.Errorf("--%s %s: %+v, %v", c.flag, c.value, b, err)
		}
	}
	for _, bad := range []string{"http://a:1,kind=baton", "http://a:1,zone=z", "http://a:1", "http://a:1,8998,color=red", "http://a:1,0"} {
		if b, err := parsePrefill(bad); err == nil {
			t.Errorf("--prefill %s: accepted as %+v", bad, b)
		}
	}
	// Who needs no prefill worker.
	for _, c := range []struct {
		r  routerFlags
		ok bool
	}{
		{routerFlags{decodes: []string{"http://a:1,kind=plain"}}, true},
		{routerFlags{decodes: []string{"http://a:1"}, localFallback: true}, true},
		{routerFlags{decodes: []string{"http://a:1"}}, false},
		{routerFlags{decodes: []string{"http://a:1,kind=plain", "http://b:1"}}, false},
		{routerFlags{prefills: []string{"http://a:1,1"}}, false},
	} {
		if _, err := c.r.config(nil, nil); (err == nil) != c.ok {
			t.Errorf("prefill %v, decode %v: %v", c.r.prefills, c.r.decodes, err)
		}
	}
}
