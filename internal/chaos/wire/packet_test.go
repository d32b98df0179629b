package wire

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"
)

// segment makes a TCP packet with right checksums.
func segment(seq, ack uint32, flags byte, payload string) []byte {
	b := make([]byte, etherLen+minIPv4+minTCP+len(payload))
	binary.BigEndian.PutUint16(b[12:], 0x0800)
	ip := b[etherLen:]
	ip[0], ip[8], ip[9] = 0x45, 64, protoTCP
	binary.BigEndian.PutUint16(ip[2:], uint16(minIPv4+minTCP+len(payload)))
	copy(ip[12:], []byte{10, 0, 0, 1, 10, 0, 0, 2})
	tcp := ip[minIPv4:]
	binary.BigEndian.PutUint16(tcp, 1111)
	binary.BigEndian.PutUint16(tcp[2:], 2222)
	binary.BigEndian.PutUint32(tcp[4:], seq)
	binary.BigEndian.PutUint32(tcp[8:], ack)
	tcp[12], tcp[13] = 5<<4, flags
	copy(tcp[minTCP:], payload)
	p, ok := parsePacket(b)
	if !ok {
		panic("no packet")
	}
	p.sign()
	return b
}

// valid reports whether both checksums are right.
func valid(p *packet) bool {
	return fold(sum(0, p.ip)) == 0 && (p.tcp == nil || fold(sum(p.pseudo(), p.tcp)) == 0)
}

func TestCorruptKeepsTheChecksumRight(t *testing.T) {
	for _, text := range []string{"x", "even", "odd"} {
		frame := segment(1, 2, flagACK, text)
		p, ok := parsePacket(frame)
		if !ok || !valid(&p) {
			t.Fatalf("packet with %q is not valid", text)
		}
		p.payload[0] ^= 4
		if valid(&p) {
			t.Fatal("a changed byte goes unnoticed: the checksum is not looked at")
		}
		p.payload[0] ^= 4
		p.corrupt(len(text)-1, 0x80)
		if !valid(&p) || string(p.payload) == text {
			t.Errorf("corrupted %q: payload %q, valid %v", text, p.payload, valid(&p))
		}
	}
}

func TestResetsFitTheConnection(t *testing.T) {
	p, _ := parsePacket(segment(1000, 5000, flagACK, "hello"))
	onward, back := p.resets()
	for name, c := range map[string]struct {
		frame    []byte
		src      uint16
		seq, ack uint32
	}{"onward": {onward, 1111, 1000, 0}, "back": {back, 2222, 5000, 1005}} {
		q, ok := parsePacket(c.frame)
		if !ok || !valid(&q) {
			t.Fatalf("%s: not a valid packet", name)
		}
		src, _ := q.ports()
		seq, ack := binary.BigEndian.Uint32(q.tcp[4:]), binary.BigEndian.Uint32(q.tcp[8:])
		if q.tcp[13]&flagRST == 0 || src != c.src || seq != c.seq || ack != c.ack {
			t.Errorf("%s: flags %#x from port %d, seq %d, ack %d; want %d, %d, %d", name, q.tcp[13], src, seq, ack, c.src, c.seq, c.ack)
		}
	}
	if r, _ := parsePacket(onward); func() bool { a, _ := r.resets(); return a != nil }() {
		t.Error("a reset is answered by a reset")
	}
}

func TestParsePacketRefuses(t *testing.T) {
	good := segment(1, 2, flagACK, "payload")
	for n := range good[:len(good)-1] {
		if p, ok := parsePacket(good[:n]); ok {
			t.Errorf("the first %d bytes pass for a whole packet: %+v", n, p)
		}
	}
	bad := bytes.Clone(good)
	bad[12] = 0x86 // IPv6
	if _, ok := parsePacket(bad); ok {
		t.Error("a frame of another protocol passes for IPv4")
	}
	bad = bytes.Clone(good)
	bad[etherLen+minIPv4+12] = 0xf0 // a TCP header of 60 bytes
	if p, ok := parsePacket(bad); !ok || p.tcp != nil {
		t.Errorf("TCP header beyond the packet: ok %v, tcp %d bytes", ok, len(p.tcp))
	}
}

func FuzzParsePacket(f *testing.F) {
	f.Add(segment(1, 2, flagACK, "payload"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, ok := parsePacket(b)
		if !ok {
			return
		}
		p.sign()
		if !valid(&p) {
			t.Error("signed and not valid")
		}
		if len(p.payload) > 0 {
			p.corrupt(0, 1)
		}
		p.resets()
	})
}

func TestDecide(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	p, _ := parsePacket(segment(1, 2, flagACK, "payload"))
	now := time.Now()
	count := func(w Weather) (drop, reset, corrupt, reordered, doubled, delayed int) {
		var due time.Time
		for range 10000 {
			f := decide(&w, &p, rng, now, &due)
			n := map[bool]int{true: 1}
			drop, reset, corrupt, reordered = drop+n[f.drop], reset+n[f.reset], corrupt+n[f.corrupt], reordered+n[f.reordered]
			doubled += n[len(f.delays) == 2]
			delayed += n[len(f.delays) > 0 && f.delays[0] > 0]
		}
		return drop, reset, corrupt, reordered, doubled, delayed
	}
	for name, c := range map[string]struct {
		w    Weather
		want [6]int // of 10000
	}{
		"fair":        {Weather{}, [6]int{}},
		"partition":   {Weather{Drop: 1}, [6]int{10000}},
		"other port":  {Weather{Drop: 1, Ports: []uint16{3333}}, [6]int{}},
		"its port":    {Weather{Drop: 1, Ports: []uint16{2222}}, [6]int{10000}},
		"half":        {Weather{Drop: .5}, [6]int{5000}},
		"resets":      {Weather{Reset: .1}, [6]int{0, 1000}},
		"damage":      {Weather{Corrupt: .2}, [6]int{0, 0, 2000}},
		"out of turn": {Weather{Reorder: .3, Duplicate: .1}, [6]int{0, 0, 0, 3000, 1000, 3000}},
		"late":        {Weather{Delay: time.Millisecond}, [6]int{0, 0, 0, 0, 0, 10000}},
	} {
		var got [6]int
		got[0], got[1], got[2], got[3], got[4], got[5] = count(c.w)
		for i := range got {
			if d := got[i] - c.want[i]; d > 300 || d < -300 || c.want[i] == 0 && got[i] != 0 || c.want[i] == 10000 && d != 0 {
				t.Errorf("%s: drops, resets, damages, reorderings, doubles, delays %v of 10000; want about %v", name, got, c.want)
				break
			}
		}
	}
}

// TestDelayKeepsTheOrder: without Reorder no packet is overtaken, however the delay changes.
func TestDelayKeepsTheOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	p, _ := parsePacket(segment(1, 2, flagACK, ""))
	now := time.Now()
	var due, last time.Time
	for i := range 1000 {
		w := Weather{Delay: time.Duration(i%7) * time.Millisecond, Jitter: 5 * time.Millisecond}
		if i%11 == 0 {
			w = Weather{}
		}
		f := decide(&w, &p, rng, now, &due)
		if at := now.Add(f.delays[0]); at.Before(last) {
			t.Fatalf("packet %d goes on %v before the one before it", i, last.Sub(at))
		} else {
			last = at
		}
		now = now.Add(100 * time.Microsecond)
	}
}
