package sglang

import (
	"bytes"
	"encoding/hex"
	"flag"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/sglang/zmtp"
)

var rewrite = flag.Bool("rewrite", false, "record testdata/frames from the real SGLang code")

// encoder is any message of the wire.
type encoder interface{ Encode() zmtp.Message }

// again encodes what m decodes to.
func again(t testing.TB, name string, m zmtp.Message) zmtp.Message {
	t.Helper()
	v, err := DecodeMessage(m)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return v.(encoder).Encode()
}

// sameFrames compares frame by frame.
func sameFrames(t testing.TB, name string, got, want zmtp.Message) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d frames, want %d", name, len(got), len(want))
		return
	}
	for i := range want {
		if !bytes.Equal(got[i], want[i]) {
			t.Errorf("%s: frame %d is %q, want %q", name, i, got[i], want[i])
		}
	}
}

// capture is a PULL socket that keeps what comes.
func capture(t *testing.T) (Endpoint, chan zmtp.Message) {
	t.Helper()
	ch := make(chan zmtp.Message, 64)
	p, err := zmtp.Listen("127.0.0.1:0", zmtp.Limits{}, func(_ net.Addr, m zmtp.Message) { ch <- m })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return Endpoint{IP: "127.0.0.1", Port: p.Addr().Port}, ch
}

func receive(t *testing.T, ch chan zmtp.Message) zmtp.Message {
	t.Helper()
	select {
	case m := <-ch:
		return m
	case <-time.After(patience):
		t.Fatal("no message came")
		return nil
	}
}

// TestFramesOfSGLang: every message that the real managers send is decoded, and encoded to the same bytes. With -rewrite
// they become testdata.
func TestFramesOfSGLang(t *testing.T) {
	t.Parallel()
	peerFiles(t)
	at, ch := capture(t)
	seen := map[string]zmtp.Message{}
	take := func(name string) zmtp.Message {
		m := receive(t, ch)
		sameFrames(t, name, again(t, name, m), m)
		seen[name] = m
		return m
	}

	// The real decode talks to us as to a prefill rank.
	b := NewBootstrap()
	dtype := "bfloat16"
	if err := b.Register(&Route{AttnTPSize: 1, AttnCPSize: 1, AttnDPSize: 1, PPSize: 1, SystemDPSize: 1, RankIP: at.IP, RankPort: at.Port, PageSize: 1,
		KVCacheDType: &dtype, Policy: policyEarly, LoadBalance: followRoom}); err != nil {
		t.Fatal(err)
	}
	port, _ := serveBootstrap(t, b, 0)
	d := startPeer(t, "decode", port, "--deferred")
	id := uint64(1<<63 - 5)
	d.receiver(id, []int{5, 0, 63}, 7)
	reg := take("registration")
	if v, _ := DecodeMessage(reg); v.(*Registration).Frames != Supported.Registration || len(v.(*Registration).KV) != 4 || v.(*Registration).Slots != 64 {
		t.Errorf("%+v", v)
	}
	meta := take("metadata")
	if v, _ := DecodeMessage(meta); v.(*Metadata).Room != id || !reflect.DeepEqual(v.(*Metadata).Pages, []int32{5, 0, 63}) || v.(*Metadata).Aux != 7 || v.(*Metadata).Required != 1 {
		t.Errorf("%+v", v)
	}
	d.do("abort", kw{"room": id})
	if v, _ := DecodeMessage(take("abort")); !v.(*Abort).HasGen {
		t.Errorf("%+v", v)
	}

	// The real prefill talks to us as to a decode manager that it does not know.
	pport := freePort(t)
	p := startPeer(t, "prefill", pport, "--deferred")
	push := zmtp.Dial(Endpoint{IP: "127.0.0.1", Port: p.hello.RankPort}.Addr(), zmtp.PushConfig{})
	t.Cleanup(func() { push.Close(0) })
	if err := push.Send((&Abort{Room: 3, Endpoint: at, Gen: 77, HasGen: true}).Encode()); err != nil {
		t.Fatal(err)
	}
	take("abort_ack")
	p.sender(4, 1, 0)
	if err := push.Send((&Metadata{Room: 4, Endpoint: at, Agent: "nobody", Pages: []int32{1}, Required: 1}).Encode()); err != nil {
		t.Fatal(err)
	}
	p.wait(4, "WaitingForInput")
	p.send(4, 0, []int{1})
	if v, _ := DecodeMessage(take("status")); v.(*Status).Status != 0 || v.(*Status).Reason == "" {
		t.Errorf("%+v", v)
	}
	if *rewrite {
		record(t, seen)
	}
}

// record writes testdata/frames, a frame a line in hex. The NIXL metadata are cut: they are opaque here and tell of the machine.
func record(t *testing.T, seen map[string]zmtp.Message) {
	t.Helper()
	dir := filepath.Join("testdata", "frames")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, m := range seen {
		var lines strings.Builder
		for i, f := range m {
			if name == "registration" && i == 5 {
				f = []byte("opaque")
			}
			lines.WriteString(hex.EncodeToString(f) + "\n")
		}
		if err := os.WriteFile(filepath.Join(dir, name+".txt"), []byte(lines.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// golden reads what record has written.
func golden(t testing.TB) map[string]zmtp.Message {
	t.Helper()
	out := map[string]zmtp.Message{}
	names, _ := filepath.Glob(filepath.Join("testdata", "frames", "*.txt"))
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		m := zmtp.Message{}
		for line := range strings.SplitSeq(strings.TrimSuffix(string(text), "\n"), "\n") {
			f, err := hex.DecodeString(line)
			if err != nil {
				t.Fatal(err)
			}
			m = append(m, f)
		}
		out[strings.TrimSuffix(filepath.Base(name), ".txt")] = m
	}
	if len(out) != 5 {
		t.Fatalf("%d recorded messages, want 5", len(out))
	}
	return out
}

// TestGoldenFrames: the recorded messages of the real release.
func TestGoldenFrames(t *testing.T) {
	for name, m := range golden(t) {
		sameFrames(t, name, again(t, name, m), m)
	}
}

// TestCutFrames: no message is taken that lacks a frame it needs, and none ends the decoder.
func TestCutFrames(t *testing.T) {
	least := map[string]int{"registration": 13, "metadata": 8, "abort": 2, "abort_ack": 4, "status": 4}
	for name, m := range golden(t) {
		for n := range m {
			whole := n >= least[name] && !(name == "abort" && n == 3) // an address without its port
			if _, err := DecodeMessage(m[:n]); whole != (err == nil) {
				t.Errorf("%s with %d frames: %v", name, n, err)
			}
		}
		for i := 1; i < len(m); i++ {
			bad := append(zmtp.Message{}, m...)
			bad[i] = []byte("\xff\x00x")
			_, _ = DecodeMessage(bad) // must return
		}
	}
}

// TestFullRegistration: the optional frames too.
func TestFullRegistration(t *testing.T) {
	r := &Registration{Endpoint: Endpoint{"fd00::1", 7}, Agent: "a", Metadata: []byte{1, 2}, KV: []uint64{1 << 63, 2}, Aux: []uint64{3}, State: [][]uint64{{4, 5}, {}},
		GPU: 3, TPSize: 2, TPRank: 1, ItemLen: 9, StateItemLens: [][]uint32{{1}}, StateDims: [][]uint32{{2}, {3}}, StateLayers: [][]uint32{{7}}, StateLens: [][]uint64{{8}},
		StagingBase: 11, StagingSize: 12, Slots: 13, Kinds: []MemKind{DRAM, VRAM}, ItemLens: []uint64{9, 10}, Layers: []uint32{0, 1}, DCPSize: 2, DCPRank: 1, Frames: 25}
	v, err := DecodeMessage(r.Encode())
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(v, r) {
		t.Errorf("%+v\n%+v", v, r)
	}
}

// FuzzDecodeMessage: total, and what it takes it can say again.
func FuzzDecodeMessage(f *testing.F) {
	for _, m := range golden(f) {
		f.Add(join(m))
	}
	f.Add(join((&Metadata{Room: 1, Endpoint: Endpoint{"::1", 1}, Agent: "x", State: [][]int32{{1, -1}}}).Encode()))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := DecodeMessage(split(b))
		if err != nil {
			return
		}
		m := v.(encoder).Encode()
		w, err := DecodeMessage(m)
		if err != nil {
			t.Fatalf("%+v: %v", v, err)
		}
		sameFrames(t, "again", w.(encoder).Encode(), m)
	})
}

// join and split make a message one string of bytes: two bytes of length before each frame.
func join(m zmtp.Message) (b []byte) {
	for _, f := range m {
		b = append(append(b, byte(len(f)>>8), byte(len(f))), f...)
	}
	return b
}

func split(b []byte) (m zmtp.Message) {
	for len(b) >= 2 && len(m) < 64 {
		n := min(int(b[0])<<8|int(b[1]), len(b)-2)
		m = append(m, b[2:2+n])
		b = b[2+n:]
	}
	return m
}
