package nixl

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// DefaultTLS leaves out of UCX what lets a writer's process store into the target's
// memory by itself: then the target's process does every store (or its network
// card on its behalf), and ending that process is a fence. See docs/nixl.md for the experiments.
const DefaultTLS = "^cma,knem,xpmem"

// LibraryEnv names the library when Config.Library does not.
const LibraryEnv = "BATON_NIXL_LIB"

// ErrNoLibrary: no library was named.
var ErrNoLibrary = errors.New("nixl: no library: run `baton setup --with nixl`, or name libnixl_capi.so with --nixl-lib or $" + LibraryEnv)

// Config of a [Transport]. Zero fields take the default.
type Config struct {
	// Library is the path of libnixl_capi.so. Default: $BATON_NIXL_LIB.
	Library string
	// Helper is the command line of a helper process, which must call [Main].
	// Default: this program with the argument "nixl-helper".
	Helper []string
	// Listen is the address of the target's control port. Default 127.0.0.1:0.
	Listen string
	// Advertise is the address that sources reach it by. Default: the listening one.
	Advertise string

	// Backend of NIXL. Default UCX.
	Backend string
	// Params are the backend's parameters, for example ucx_devices, num_workers, engine_config.
	Params map[string]string
	// TLS is UCX_TLS for the helpers: which of UCX's transports may be used. Default:
	// $UCX_TLS if that is set, otherwise [DefaultTLS].
	TLS string
	// Devices is UCX_NET_DEVICES for the helpers. Default: what the environment says.
	Devices string
	// Memory is the kind of memory that is registered, DRAM or VRAM, and its device, as in
	// "VRAM:0". Default DRAM.
	Memory string
	// Block is the size in bytes of blocks that are prepared once and then named by index, if both
	// sides have the same and no pool was named (Transport.UsePool). 0: none.
	Block int

	// Handshake bounds a connection's time until it has said hello, and the start of a
	// helper. Default 20 s: the library takes half a second of a processor to start.
	Handshake time.Duration
	// MaxHalfOpen is how many connections may be in the handshake. Default 64.
	MaxHalfOpen int
	// Queue is how many writes a Peer takes before ErrBusy. Default 1024.
	Queue int
	// Watch is the interval in which a helper must show life, Misses how many intervals
	// it may miss before it is killed. Defaults 1 s and 5.
	Watch  time.Duration
	Misses int
	// Stall is how many Watch intervals a Peer's writes may make no progress, and a
	// revoked writer may stay inside its grant, before the session is ended. Default 20.
	Stall int
	// Log hears of lost helpers and stalled sessions. Default: nobody.
	Log *slog.Logger
	// CloseGrace is how long Target.Close waits for writers that only their own end
	// fences. Default 2 s.
	CloseGrace time.Duration
}

// withDefaults returns a filled copy, or says what is wrong.
func (c Config) withDefaults() (Config, error) {
	for _, d := range []struct {
		p *string
		v string
	}{{&c.Library, os.Getenv(LibraryEnv)}, {&c.Listen, "127.0.0.1:0"}, {&c.Backend, "UCX"}, {&c.TLS, os.Getenv("UCX_TLS")}, {&c.TLS, DefaultTLS}, {&c.Memory, "DRAM"}} {
		if *d.p == "" {
			*d.p = d.v
		}
	}
	for _, d := range []struct {
		p *int
		v int
	}{{&c.MaxHalfOpen, 64}, {&c.Queue, 1024}, {&c.Misses, 5}, {&c.Stall, 20}, {&c.Block, 0}} {
		if *d.p == 0 {
			*d.p = d.v
		}
		if *d.p < 0 {
			return c, errors.New("nixl: config: numbers must not be negative")
		}
	}
	for _, d := range []struct {
		p *time.Duration
		v time.Duration
	}{{&c.Handshake, 20 * time.Second}, {&c.Watch, time.Second}, {&c.CloseGrace, 2 * time.Second}} {
		if *d.p == 0 {
			*d.p = d.v
		}
		if *d.p < 0 {
			return c, errors.New("nixl: config: times must be positive")
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if _, _, err := c.memory(); err != nil {
		return c, err
	}
	if len(c.Helper) == 0 {
		self, err := os.Executable()
		if err != nil {
			return c, fmt.Errorf("nixl: find the own program for the helper process: %w", err)
		}
		c.Helper = []string{self, "nixl-helper"}
	}
	return c, c.findLibrary()
}

// findLibrary makes the library's path absolute and sees that a file is there.
func (c *Config) findLibrary() error {
	if c.Library == "" {
		return ErrNoLibrary
	}
	path, err := filepath.Abs(c.Library)
	if err != nil {
		return fmt.Errorf("nixl: library %s: %w", c.Library, err)
	}
	st, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("nixl: library: %w", err)
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("nixl: library %s is not a file; name libnixl_capi.so itself", path)
	}
	c.Library = path
	return nil
}

// memory parses Memory.
func (c *Config) memory() (kind string, device uint64, err error) {
	kind, number, has := strings.Cut(c.Memory, ":")
	if _, ok := memoryKinds[kind]; !ok {
		return "", 0, fmt.Errorf("nixl: memory kind %q: use DRAM, or VRAM:DEVICE", c.Memory)
	}
	if has {
		if device, err = strconv.ParseUint(number, 10, 32); err != nil {
			return "", 0, fmt.Errorf("nixl: device of memory kind %q: %w", c.Memory, err)
		}
	}
	return kind, device, nil
}

// env is what helpers get besides this process's environment.
func (c *Config) env() []string {
	out := []string{"UCX_TLS=" + c.TLS}
	if os.Getenv("GOTRACEBACK") == "" {
		out = append(out, "GOTRACEBACK=none") // its last words are then the crash, not registers
	}
	if c.Devices != "" {
		out = append(out, "UCX_NET_DEVICES="+c.Devices)
	}
	return out
}

// job is the start command of a helper called name over regions of these sizes.
func (c *Config) job(name string, regions ...uint64) startJob {
	kind, device, _ := c.memory() // withDefaults has checked it
	j := startJob{Library: c.Library, Name: name, Backend: c.Backend, Kind: kind, Device: device, Regions: regions}
	for _, k := range slices.Sorted(maps.Keys(c.Params)) {
		j.Params = append(j.Params, param{k, c.Params[k]})
	}
	return j
}

// writerStores are the transports of UCX by which a writer's process stores into the
// memory of the target's process without its help, and the names of groups of transports
// that hold one of them.
var writerStores = []string{"cma", "knem", "xpmem", "cuda_ipc", "rocm_ipc", "ze_ipc"}
var writerGroups = []string{"all", "sm", "shm", "mm", "cuda", "rocm", "ze"}

// targetFences reports whether, with these transports, ending the target's helper is a
// fence: no process of the writer's can store into its memory. Only UCX over host memory is known.
func (c *Config) targetFences() bool {
	if kind, _, _ := c.memory(); c.Backend != "UCX" || kind != "DRAM" {
		return false
	}
	list, negative := strings.CutPrefix(strings.ReplaceAll(c.TLS, " ", ""), "^")
	items := strings.Split(list, ",")
	for i := range items { // "\name" is the transport only, without its companions
		items[i] = strings.TrimLeft(items[i], `\`)
	}
	if negative { // for host memory only the first three matter
		for _, t := range writerStores[:3] {
			if !slices.Contains(items, t) {
				return false
			}
		}
		return true
	}
	for _, t := range items {
		if slices.Contains(writerStores, t) || slices.Contains(writerGroups, t) {
			return false
		}
	}
	return true
}
