package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/baton-pd/baton/internal/discovery"
	"github.com/baton-pd/baton/internal/discovery/etcd"
	"github.com/baton-pd/baton/internal/discovery/kubernetes"
	"github.com/baton-pd/baton/internal/router"
)

// fleetFlags say where the router's workers are listed besides its command line.
type fleetFlags struct {
	file        string
	fileEvery   time.Duration
	dns         []string
	dnsEvery    time.Duration
	kube        string
	kubeSpace   string
	etcd        []string
	etcdPrefix  string
	etcdTLS     struct{ ca, cert, key string } // files
	adminToken  string                         // a file
	sourceNames map[string]bool
}

func (f *fleetFlags) addTo(fs *pflag.FlagSet) {
	fs.StringVar(&f.file, "workers-file", "", "JSON file that lists workers and may change")
	fs.DurationVar(&f.fileEvery, "workers-interval", time.Second, "time between two readings of --workers-file")
	fs.StringArrayVar(&f.dns, "workers-dns", nil, "workers in DNS: leg=prefill|decode,host=NAME,port=PORT or ...,srv=NAME, then any of ,bootstrap-port=PORT (prefill), ,scheme=https ,zone=NAME and ,kind=KIND (repeat for more)")
	fs.DurationVar(&f.dnsEvery, "dns-interval", 10*time.Second, "time between two look-ups of a --workers-dns name")
	fs.StringArrayVar(&f.etcd, "workers-etcd", nil, "etcd that lists workers: host:port or URL of one of its members (repeat for more)")
	fs.StringVar(&f.etcdPrefix, "etcd-prefix", "/baton/workers/", "what the workers' keys in etcd begin with")
	fs.StringVar(&f.etcdTLS.ca, "etcd-ca", "", "file with the certificates that etcd's is checked against (default: the system's)")
	fs.StringVar(&f.etcdTLS.cert, "etcd-cert", "", "file with the router's certificate for etcd")
	fs.StringVar(&f.etcdTLS.key, "etcd-key", "", "file with its key")
	fs.StringVar(&f.kube, "workers-kubernetes", "", "workers in Kubernetes: a label selector of their Services, for example baton.dev/leg")
	fs.StringVar(&f.kubeSpace, "kubernetes-namespace", "", "namespace of the workers' Services (default: the router's own)")
	fs.StringVar(&f.adminToken, "admin-token-file", "", "file with the token that changes of the fleet by /workers must carry; without it they are refused")
}

// named: workers may come from elsewhere than the command line.
func (f *fleetFlags) named() bool {
	return f.file != "" || len(f.dns) > 0 || len(f.etcd) > 0 || f.kube != "" || f.adminToken != ""
}

// sources makes what the flags name.
func (f *fleetFlags) sources() (out []discovery.Source, err error) {
	add := func(s discovery.Source, err error) error {
		if err != nil {
			return usageError{err}
		}
		if f.sourceNames[s.Name()] {
			return usagef("%s is named twice", s.Name())
		}
		f.sourceNames[s.Name()] = true
		out = append(out, s)
		return nil
	}
	f.sourceNames = map[string]bool{}
	if f.file != "" {
		s, err := discovery.NewFile(f.file, f.fileEvery)
		if err := add(s, err); err != nil {
			return nil, err
		}
	}
	for _, text := range f.dns {
		c, err := discovery.ParseDNS(text)
		if err != nil {
			return nil, usagef("--workers-dns: %w", err)
		}
		s, err := discovery.NewDNS(c, f.dnsEvery, nil)
		if err := add(s, err); err != nil {
			return nil, err
		}
	}
	if len(f.etcd) > 0 {
		tls, err := f.etcdTLSConfig()
		if err != nil {
			return nil, err
		}
		s, err := etcd.New(etcd.Config{Endpoints: f.etcd, Prefix: f.etcdPrefix, TLS: tls, Username: os.Getenv("ETCD_USERNAME"), Password: os.Getenv("ETCD_PASSWORD")})
		if err := add(s, err); err != nil {
			return nil, err
		}
	}
	if f.kube != "" {
		s, err := f.kubernetes()
		if err := add(s, err); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// kubernetes is the source in the cluster that the router's pod is in.
func (f *fleetFlags) kubernetes() (*kubernetes.Source, error) {
	where, err := rest.InClusterConfig()
	if err != nil {
		return nil, usagef("--workers-kubernetes works in a pod that has a service account: %w", err)
	}
	space := f.kubeSpace
	if space == "" {
		text, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
		if err != nil {
			return nil, usagef("--kubernetes-namespace is needed: %w", err)
		}
		space = strings.TrimSpace(string(text))
	}
	return kubernetes.New(kubernetes.Config{Namespace: space, Selector: f.kube}, where)
}

// etcdTLSConfig reads the files; nil if there is none.
func (f *fleetFlags) etcdTLSConfig() (*tls.Config, error) {
	files := f.etcdTLS
	if files.ca == "" && files.cert == "" && files.key == "" {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if files.ca != "" {
		text, err := os.ReadFile(files.ca)
		if err != nil {
			return nil, usagef("--etcd-ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(text) {
			return nil, usagef("--etcd-ca %s: no certificate in it", files.ca)
		}
	}
	if files.cert != "" || files.key != "" {
		pair, err := tls.LoadX509KeyPair(files.cert, files.key)
		if err != nil {
			return nil, usagef("--etcd-cert and --etcd-key: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// token reads the admin token.
func (f *fleetFlags) token() (string, error) {
	if f.adminToken == "" {
		return "", nil
	}
	text, err := os.ReadFile(f.adminToken)
	if err != nil {
		return "", usagef("--admin-token-file: %w", err)
	}
	token := strings.TrimSpace(string(text))
	if len(token) < 16 {
		return "", usagef("--admin-token-file %s: the token has %d characters; at least 16 are needed", f.adminToken, len(token))
	}
	return token, nil
}

// feed passes on what sources tell until the returned function, which waits for them, is called.
func feed(ctx context.Context, rt *router.Router, log *slog.Logger, sources []discovery.Source) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for _, s := range sources {
		wg.Go(func() {
			s.Run(ctx, func(set []discovery.Worker, err error) {
				if err != nil {
					rt.SourceFailed(s.Name(), err)
					return
				}
				prefills, decodes := split(set)
				_ = rt.SetWorkers(s.Name(), prefills, decodes) // it has logged and counted what is wrong
			})
			if c, ok := s.(io.Closer); ok {
				if err := c.Close(); err != nil {
					log.Warn("could not close a source of workers", "source", s.Name(), "err", err)
				}
			}
		})
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

// split turns a source's words into the router's.
func split(set []discovery.Worker) (prefills, decodes []router.Backend) {
	for _, w := range set {
		b := router.Backend{URL: w.URL, BootstrapHost: w.BootstrapHost, BootstrapPort: w.BootstrapPort, Zone: w.Zone, Models: w.Models, Kind: router.Kind(w.Kind)}
		if w.Leg == discovery.LegPrefill {
			prefills = append(prefills, b)
		} else {
			decodes = append(decodes, b)
		}
	}
	return prefills, decodes
}
