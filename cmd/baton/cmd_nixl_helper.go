package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/baton-pd/baton/internal/setup"
	"github.com/baton-pd/baton/internal/transfer/nixl"
)

// nixlFlags are a worker's flags for --transport nixl.
type nixlFlags struct {
	lib, backend, tls, devices, memory string
	params                             []string
}

func (n *nixlFlags) add(f *pflag.FlagSet) {
	f.StringVar(&n.lib, "nixl-lib", "", "libnixl_capi.so (default: $"+nixl.LibraryEnv+", what 'baton setup --with nixl' fetched, or a site-packages directory)")
	f.StringVar(&n.backend, "nixl-backend", "UCX", "NIXL backend")
	f.StringVar(&n.tls, "nixl-tls", "", "UCX_TLS for NIXL: which of UCX's transports it may use (default: $UCX_TLS, or "+nixl.DefaultTLS+"; see docs/nixl.md)")
	f.StringVar(&n.devices, "nixl-devices", "", "UCX_NET_DEVICES for NIXL, for example mlx5_0:1 or eth0")
	f.StringVar(&n.memory, "nixl-memory", "DRAM", "kind of memory to register: DRAM, or VRAM:DEVICE")
	f.StringArrayVar(&n.params, "nixl-param", nil, "parameter of the NIXL backend, key=value (repeat for more)")
}

// open makes the transport. What is wrong with the flags, the library or what it finds on this machine is told
// here, not at the first request.
func (n *nixlFlags) open(cacheDir, listen, advertise string, log *slog.Logger) (*nixl.Transport, error) {
	c := nixl.Config{Library: n.lib, Listen: listen, Advertise: advertise, Backend: n.backend, TLS: n.tls, Devices: n.devices, Memory: n.memory, Log: log}
	for _, p := range n.params {
		k, v, ok := strings.Cut(p, "=")
		if !ok || k == "" {
			return nil, usagef("--nixl-param %q: use key=value", p)
		}
		if c.Params == nil {
			c.Params = make(map[string]string)
		}
		c.Params[k] = v
	}
	t := nixl.New(c)
	if errors.Is(t.Err(), nixl.ErrNoLibrary) {
		path, err := setup.LocateNIXL(cacheDir)
		if err != nil {
			return nil, fmt.Errorf("--transport nixl: %w, or name --nixl-lib", err)
		}
		c.Library = path
		t = nixl.New(c)
	}
	if err := t.Err(); err != nil {
		return nil, usageError{fmt.Errorf("--transport nixl: %w", err)}
	}
	if err := t.Probe(context.Background()); err != nil {
		return nil, fmt.Errorf("--transport nixl: %w", err)
	}
	return t, nil
}

// newNIXLHelper is the process in which the NIXL library runs; see package nixl.
func newNIXLHelper() *cobra.Command {
	return &cobra.Command{
		Use:    "nixl-helper",
		Short:  "Run the NIXL library for a worker (started by workers, not by hand)",
		Hidden: true,
		RunE: func(*cobra.Command, []string) error {
			if nixl.Main() != 0 {
				return errors.New("the NIXL helper has ended with an error")
			}
			return nil
		},
	}
}
