package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Resolver is what a DNS source asks; a [net.Resolver] is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupSRV(ctx context.Context, service, proto, name string) (cname string, addrs []*net.SRV, err error)
}

// lookupTimeout bounds one look-up.
const lookupTimeout = 10 * time.Second

// DNSConfig says what to look up and what its addresses are.
type DNSConfig struct {
	Leg string
	// Host is looked up for A and AAAA records: each address is a worker at Port. Instead of it, SRV is
	// looked up, a full name such as _http._tcp.decode.example.org: each target and port is a worker.
	Host, SRV     string
	Port          int
	Scheme        string // [http]
	BootstrapPort int    // of each prefill worker
	Zone, Kind    string
}

// ParseDNS reads "leg=prefill,host=NAME,port=8081,bootstrap-port=8998" or "leg=decode,srv=_http._tcp.NAME", with
// scheme=, zone= and kind= as options.
func ParseDNS(s string) (c DNSConfig, err error) {
	for _, part := range strings.Split(s, ",") {
		key, v, ok := strings.Cut(part, "=")
		if !ok || v == "" {
			return c, fmt.Errorf("%.64q: want KEY=VALUE", part)
		}
		switch strings.TrimSpace(key) {
		case "leg":
			c.Leg = v
		case "host":
			c.Host = v
		case "srv":
			c.SRV = v
		case "scheme":
			c.Scheme = v
		case "zone":
			c.Zone = v
		case "kind":
			c.Kind = v
		case "port":
			c.Port, err = strconv.Atoi(v)
		case "bootstrap-port":
			c.BootstrapPort, err = strconv.Atoi(v)
		default:
			return c, fmt.Errorf("%.64q: want leg, host, srv, port, bootstrap-port, scheme, zone or kind", key)
		}
		if err != nil {
			return c, fmt.Errorf("%s: %.64q is not a number", key, v)
		}
	}
	return c, nil
}

// DNS is a source that looks a name up again and again: the standard resolver does not tell how long an answer holds.
// A failed look-up, also one that finds nothing, keeps the set before it: a resolver that is ill must not empty a
// fleet, and workers that have really gone fail their probes.
type DNS struct {
	c        DNSConfig
	resolver Resolver
	interval time.Duration
}

// NewDNS checks c. A nil resolver is the system's.
func NewDNS(c DNSConfig, interval time.Duration, r Resolver) (*DNS, error) {
	if c.Scheme == "" {
		c.Scheme = "http"
	}
	if r == nil {
		r = net.DefaultResolver
	}
	what := c.Host + c.SRV
	probe := Worker{Leg: c.Leg, URL: c.Scheme + "://host:1", BootstrapPort: c.BootstrapPort, Kind: c.Kind}
	switch {
	case (c.Host == "") == (c.SRV == ""):
		return nil, errors.New("dns: want either a host or an srv name")
	case c.Host != "" && (c.Port < 1 || c.Port > 65535):
		return nil, fmt.Errorf("dns %s: port %d is not a port", what, c.Port)
	case interval <= 0:
		return nil, fmt.Errorf("dns %s: %w", what, errInterval)
	}
	if err := probe.Check(); err != nil {
		return nil, fmt.Errorf("dns %s: %w", what, err)
	}
	return &DNS{c, r, interval}, nil
}

// Name is "dns:", the leg and the name.
func (d *DNS) Name() string { return "dns:" + d.c.Leg + ":" + d.c.Host + d.c.SRV }

// Run implements [Source].
func (d *DNS) Run(ctx context.Context, report Report) { poll(ctx, d.interval, report, d.read) }

func (d *DNS) read(ctx context.Context) ([]Worker, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	var at []string
	if d.c.SRV != "" {
		_, records, err := d.resolver.LookupSRV(ctx, "", "", d.c.SRV)
		if err != nil {
			return nil, fmt.Errorf("dns: %w", err)
		}
		for _, s := range records {
			at = append(at, net.JoinHostPort(strings.TrimSuffix(s.Target, "."), strconv.Itoa(int(s.Port))))
		}
	} else {
		addrs, err := d.resolver.LookupNetIP(ctx, "ip", d.c.Host)
		if err != nil {
			return nil, fmt.Errorf("dns: %w", err)
		}
		for _, a := range addrs {
			at = append(at, net.JoinHostPort(a.Unmap().String(), strconv.Itoa(d.c.Port)))
		}
	}
	if len(at) == 0 {
		return nil, fmt.Errorf("dns: %s has no usable record", d.c.Host+d.c.SRV)
	}
	slices.Sort(at)
	set := make([]Worker, 0, len(at))
	for _, a := range slices.Compact(at) {
		set = append(set, Worker{Leg: d.c.Leg, URL: d.c.Scheme + "://" + a, BootstrapPort: d.c.BootstrapPort, Zone: d.c.Zone, Kind: d.c.Kind})
	}
	if err := Normalize(set); err != nil {
		return nil, fmt.Errorf("dns: %w", err)
	}
	return set, nil
}
