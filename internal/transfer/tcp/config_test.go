package tcp

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

func TestConfigIsChecked(t *testing.T) {
	for name, c := range map[string]Config{
		"negative timeout": {Handshake: -1},
		"user timeout":     {UserTimeout: time.Microsecond},
		"negative limit":   {Queue: -1},
		"small frame":      {FrameBytes: 100},
		"large frame":      {FrameBytes: maxFrame + 1},
		"small buffer":     {ReceiveBuffer: 1000},
	} {
		tr := New(c)
		if _, err := tr.Listen(transfer.Memory{FD: -1}, newSink()); err == nil {
			t.Errorf("%s: Listen accepted it", name)
		}
		if _, err := tr.Dial(context.Background(), transfer.Descriptor{Kind: "tcp"}, 1); err == nil {
			t.Errorf("%s: Dial accepted it", name)
		}
	}
}

func TestAdvertisedAddress(t *testing.T) {
	some, err := someAddress()
	if err != nil || net.ParseIP(some) == nil {
		t.Fatalf("address of this machine: %q, %v", some, err)
	}
	any4 := &net.TCPAddr{IP: net.IPv4zero, Port: 70}
	for _, tc := range []struct {
		want string
		ln   *net.TCPAddr
		addr string // "" : refused
	}{
		{"", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 70}, "127.0.0.1:70"},
		{"", any4, net.JoinHostPort(some, "70")},
		{"worker-3", any4, "worker-3:70"},
		{"10.0.0.7", any4, "10.0.0.7:70"},
		{"worker-3:99", any4, "worker-3:99"},
		{"fd00::1", any4, "[fd00::1]:70"},
		{"[fd00::1]:9", any4, "[fd00::1]:9"},
		{"a:b:c", any4, ""},
		{":99", any4, ""},
	} {
		got, err := advertised(tc.want, tc.ln)
		if (err != nil) != (tc.addr == "") || err == nil && got != tc.addr {
			t.Errorf("advertise %q on %v: %q, %v; want %q", tc.want, tc.ln, got, err, tc.addr)
		}
	}
}

func TestBoundToAllAddresses(t *testing.T) {
	p := listen(t, Config{Listen: "0.0.0.0:0", Advertise: "localhost"}, 64)
	d := p.tgt.Descriptor()
	if host, port, err := net.SplitHostPort(d.Addr); err != nil || host != "localhost" || port == "0" {
		t.Fatalf("descriptor %+v", d)
	}
	if d.Kind != "tcp" || d.Size != 64 {
		t.Fatalf("descriptor %+v", d)
	}
	p.works(t, 1)
}

func TestReachable(t *testing.T) {
	tr := New(Config{})
	for d, want := range map[[2]string]bool{
		{"tcp", "h:1"}: true, {"shm", "h:1"}: false, {"tcp", "h"}: false, {"tcp", ":1"}: false, {"tcp", "h:0"}: false, {"tcp", ""}: false,
	} {
		if got := tr.Reachable(transfer.Descriptor{Kind: d[0], Addr: d[1]}); got != want {
			t.Errorf("%v: reachable %v", d, got)
		}
	}
}
