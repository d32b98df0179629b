package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/config"
	"github.com/baton-pd/baton/internal/supervise"
	"github.com/baton-pd/baton/internal/worker"
)

func newPrefill(g *globals) *cobra.Command {
	var w workerFlags
	var bootstrap string
	c := &cobra.Command{
		Use:   "prefill",
		Short: "Run a prefill worker: computes prompts and sends their KV",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return w.run(cmd.Context(), g, "prefill", bootstrap)
		},
	}
	w.add(c.Flags(), "127.0.0.1:8081")
	c.Flags().StringVar(&bootstrap, "bootstrap-listen", "127.0.0.1:8998", "address that decode workers open their sessions to")
	return c
}

func newDecode(g *globals) *cobra.Command {
	var w workerFlags
	var monolithic, local bool
	c := &cobra.Command{
		Use:   "decode",
		Short: "Run a decode worker: receives KV and streams tokens",
		RunE: func(cmd *cobra.Command, _ []string) error {
			w.monolithic, w.local = monolithic, local
			return w.run(cmd.Context(), g, "decode", "")
		},
	}
	w.add(c.Flags(), "127.0.0.1:8082")
	w.edge.addPeer(c.Flags())
	c.Flags().IntVar(&w.prefixPages, "prefix-cache-pages", 0, "landing pages that may stay with the KV of ended prompts, for prompts that begin alike; 0: none (sim engine with ranks only)")
	c.Flags().BoolVar(&monolithic, "monolithic", false, "compute prompts here; no prefill worker, no sessions")
	c.Flags().BoolVar(&local, "allow-local", true, "also serve requests that name no prefill worker, by computing their prompts here")
	return c
}

// run serves one worker until ctx ends or the parent is gone.
func (w *workerFlags) run(ctx context.Context, g *globals, role, bootstrap string) error {
	log, err := g.logger(os.Stderr)
	if err != nil {
		return err
	}
	log = log.With("role", role)
	config.SpareProcs()
	defer config.HeapFloor()()
	ctx, stop := supervise.WatchParent(ctx)
	defer stop()

	var seen worker.Config // files are read, and ports taken, before the model is loaded: what is wrong with them is known at once
	if err := w.edge.configure(&seen); err != nil {
		return err
	}
	l, err := net.Listen("tcp", w.listen)
	if err != nil {
		return usageError{fmt.Errorf("--listen: %w", err)}
	}
	var bl net.Listener
	if bootstrap != "" {
		if bl, err = net.Listen("tcp", bootstrap); err != nil {
			return usageError{fmt.Errorf("--bootstrap-listen: %w", err)}
		}
	}
	if w.id == "" {
		w.id = l.Addr().String()
	}
	log = log.With("worker", w.id)
	began := time.Now()
	eng, err := w.engineFlags.open(log)
	if err != nil {
		return err
	}
	in := eng.Info()
	log.Info("model loaded", "model", in.ModelName, "engine", in.Engine, "threads", in.Threads, "ctx", in.ContextLen,
		"kv_cells", in.KVCells, "chunk", in.ChunkTokens, "took", time.Since(began).Round(time.Millisecond))
	cfg := w.config(eng, l)
	cfg.TLS, cfg.PeerTLS, cfg.Keys, cfg.OpenMetrics = seen.TLS, seen.PeerTLS, seen.Keys, seen.OpenMetrics
	cfg.Log, cfg.Metrics = log, prometheus.NewRegistry()
	if cfg.Tracer, err = w.otlp.open(role, w.id, log, cfg.Metrics); err != nil {
		return err
	}
	defer cfg.Tracer.Close()
	wk, err := w.build(role, cfg, bl)
	if err != nil {
		return err
	}
	defer watch(ctx, log, w.edge.watched)()
	ready := supervise.ReadyInfo{Role: role, HTTP: l.Addr().String()}
	if bl != nil {
		ready.Bootstrap = bl.Addr().String()
	}
	log.Info("ready", "http", ready.HTTP, "bootstrap", ready.Bootstrap, "transport", w.transport)
	if err := supervise.Ready(ready); err != nil {
		log.Warn("could not report readiness", "err", err)
	}
	var failure error
	select {
	case <-ctx.Done():
		log.Info("shutting down", "grace", w.shutdownGrace)
	case failure = <-wk.Failed():
		log.Error("the worker can not go on", "err", failure)
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), w.shutdownGrace)
	defer cancel()
	return errors.Join(failure, wk.Close(grace))
}
