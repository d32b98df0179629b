package chaos

import (
	"fmt"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/engine/sim"
)

// simChunk and simPool are small, so that a prompt has many chunks, and a chunk many pages, and a few
// prompts fill a pool.
const (
	simChunk = 16 // tokens
	simPool  = 4  // MiB
)

// SimConfig is a run on the sim engine, without binary, directory and schedule: 2 prefill and 2 decode workers, 8 KiB
// of KV a token, poisoned pools of 512 tokens, and sessions that notice a silent peer after 2.5 s.
func SimConfig(seed uint64, transport string) (Config, error) {
	const model = "dim=1024"
	m, err := sim.ParseConfig(model)
	if err != nil {
		return Config{}, fmt.Errorf("chaos: %w", err)
	}
	m.ChunkTokens = simChunk
	m = m.WithDefaults()
	perToken := 2 * m.Layers * m.KVHeads * m.HeadDim
	return Config{
		Seed: seed, World: World{Prefills: 2, Decodes: 2, Transport: transport},
		Work: &SimWork{Model: m, PoolTokens: simPool << 20 / perToken},
		Args: []string{"--engine", "sim", "--chunk", strconv.Itoa(simChunk), "--sim", model + ",prefill-chunk=2ms,step=1ms",
			"--max-running", "8", "--pool-mib", strconv.Itoa(simPool), "--page-bytes", "4096", "--poison-pages",
			"--keepalive-time", "1s", "--keepalive-timeout", "1500ms", "--shutdown-grace", "1s"},
		RouterArgs: []string{"--shutdown-grace", "1s"},
	}, nil
}

// ModelConfig is a run on llama.cpp with a real model, one worker of each kind and one compute thread each, so
// that answers are equal to the last bit. engine are the flags that name engine, model and library.
func ModelConfig(seed uint64, transport string, engine []string) Config {
	return Config{
		Seed: seed, World: World{Prefills: 1, Decodes: 1, Transport: transport, Gap: 1500 * time.Millisecond},
		Work: TextWork(seed, 8, 80, 12), Clients: 4, Pace: Pace{Deadline: 15 * time.Second, Hurry: 1500 * time.Millisecond},
		Args: append(append([]string(nil), engine...), "--threads", "1", "--max-running", "6", "--pool-mib", "64",
			"--keepalive-time", "1s", "--keepalive-timeout", "1500ms", "--shutdown-grace", "1s"),
		RouterArgs: []string{"--shutdown-grace", "1s"},
	}
}

// Rebase moves a part of a schedule so that it begins after a second, and says how many of requests belong to it at
// the same rate.
func Rebase(part, whole []Fault, requests int) ([]Fault, int) {
	length := func(faults []Fault) time.Duration {
		end := time.Second
		for _, f := range faults {
			end = max(end, f.At+f.For)
		}
		return end
	}
	out := append([]Fault(nil), part...)
	if len(out) > 0 {
		shift := max(out[0].At-time.Second, 0)
		for i := range out {
			out[i].At -= shift
		}
	}
	return out, max(int(float64(requests)*float64(length(out))/float64(length(whole))), 20)
}
