package sim

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// ParseConfig reads settings as "key=value,...": seed, layers, heads, dim, ctx,
// cells, eos-every, eos-at, layer-group (numbers); tp, pp, page (numbers), hnd, mla (true or false),
// which make the worker one of several ranks; prefill-chunk, prefill-token, step, step-row,
// export, import, swap (durations such as 2ms); recheck (true or false).
func ParseConfig(s string) (Config, error) {
	var c Config
	ints := map[string]*int{"layers": &c.Layers, "heads": &c.KVHeads, "dim": &c.HeadDim, "ctx": &c.ContextLen,
		"cells": &c.KVCells, "eos-every": &c.EOSEvery, "eos-at": &c.EOSAt, "layer-group": &c.LayerGroup,
		"tp": &c.TP, "pp": &c.PP, "page": &c.PageTokens}
	flags := map[string]*bool{"recheck": &c.Recheck, "hnd": &c.HeadsFirst, "mla": &c.Latent}
	times := map[string]*time.Duration{"prefill-chunk": &c.PrefillChunkTime, "prefill-token": &c.PrefillTokenTime, "step": &c.StepTime,
		"step-row": &c.StepRowTime, "export": &c.ExportTime, "import": &c.ImportTime, "swap": &c.SwapTime}
	for item := range strings.SplitSeq(s, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		key, value, ok := strings.Cut(item, "=")
		if !ok {
			return c, fmt.Errorf("sim setting %q: want key=value", item)
		}
		var err error
		if p := ints[key]; p != nil {
			*p, err = strconv.Atoi(value)
		} else if p := times[key]; p != nil {
			*p, err = time.ParseDuration(value)
		} else if key == "seed" {
			c.Seed, err = strconv.ParseUint(value, 10, 64)
		} else if p := flags[key]; p != nil {
			*p, err = strconv.ParseBool(value)
		} else {
			return c, fmt.Errorf("sim setting %q is unknown", key)
		}
		if err != nil {
			return c, fmt.Errorf("sim setting %s: %w", item, err)
		}
	}
	return c, c.WithDefaults().Validate()
}
