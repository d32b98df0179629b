package sim

import (
	"strings"
	"testing"
)

// FuzzParseConfig: settings are refused with the setting named, or give a configuration that
// holds all bounds and whose sizes cannot overflow.
func FuzzParseConfig(f *testing.F) {
	for _, s := range []string{
		"", "seed=1,layers=2,heads=2,dim=8,ctx=4096,cells=16384,eos-every=3,eos-at=9",
		"prefill-chunk=2ms,prefill-token=1us,step=1ms,step-row=1us,export=1ms,import=1ms,swap=1ms,recheck=true",
		"layers=-1", "layers", "=", "layers=1024,heads=1024,dim=16384", "step=-1s", "what=1", " , ,seed=18446744073709551615", "cells=9223372036854775807",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		c, err := ParseConfig(s)
		if err != nil {
			if !strings.Contains(err.Error(), "sim") {
				t.Fatalf("%q: %v does not say whose setting it is", s, err)
			}
			return
		}
		full := c.WithDefaults()
		if err := full.Validate(); err != nil {
			t.Fatalf("%q accepted as %+v: %v", s, full, err)
		}
		if b := full.cellBytes(); b < 1 || b > 1<<36 {
			t.Fatalf("%q: %d bytes a cell", s, b)
		}
		if again, err := ParseConfig(s + ",seed=7"); err != nil || again.Seed != 7 {
			t.Fatalf("%q and a seed: %+v, %v", s, again, err)
		}
	})
}
