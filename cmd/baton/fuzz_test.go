package main

import (
	"strings"
	"testing"
)

// FuzzPrefillFlag: a --prefill value is refused with the flag named, or names a worker and a port, which only vLLM does without.
func FuzzPrefillFlag(f *testing.F) {
	for _, s := range []string{"http://10.0.0.5:8081,8998", "http://h,[::1]:1", "http://h/,x:70000", "h,1", ",", "http://h,0", "http://h,:5", "http://h,kind=vllm"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		b, err := parsePrefill(s)
		if err != nil {
			if !strings.Contains(err.Error(), "--prefill") {
				t.Fatalf("%q: %v does not name the flag", s, err)
			}
			return
		}
		if noPort := b.BootstrapPort < 1 && b.Kind != "vllm"; noPort || b.BootstrapPort > 65535 || b.URL == "" || strings.HasSuffix(b.URL, "/") {
			t.Fatalf("%q became %+v", s, b)
		}
	})
}
