package main

import (
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/baton-pd/baton/internal/router"
	"github.com/baton-pd/baton/internal/router/accesslog"
)

// seenFlags say what a router shows of its requests.
type seenFlags struct {
	accessLog string
	ui        bool
}

func (s *seenFlags) addTo(f *pflag.FlagSet) {
	f.BoolVar(&s.ui, "ui", true, "serve the page at /ui")
	f.StringVar(&s.accessLog, "access-log", "", "file for a JSON line of each request; - is standard output. Opened anew on SIGHUP and when it was renamed")
}

// open makes what the flags say part of cfg; done ends it, and is to be called when the router has been closed.
func (s *seenFlags) open(cfg *router.Config, reg prometheus.Registerer, log *slog.Logger) (done func(), err error) {
	cfg.NoUI = !s.ui
	if s.accessLog == "" {
		return func() {}, nil
	}
	l, err := accesslog.Open(accesslog.Config{Path: s.accessLog, Log: log, Registerer: reg})
	if err != nil {
		return nil, err
	}
	cfg.AccessLog = l
	hups := make(chan os.Signal, 1)
	signal.Notify(hups, syscall.SIGHUP)
	var wg sync.WaitGroup
	wg.Go(func() {
		for range hups {
			l.Reopen()
		}
	})
	return func() {
		signal.Stop(hups)
		close(hups)
		wg.Wait()
		if err := l.Close(); err != nil {
			log.Error("the end of the access log is missing", "err", err)
		}
	}, nil
}
