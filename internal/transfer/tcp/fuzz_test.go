package tcp

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// FuzzStream sends arbitrary bytes after a good handshake. The target must not store
// outside the grant, must go on serving others, and must fence the session.
func FuzzStream(f *testing.F) {
	h := header{seq: 1, grant: 1, key: testKey}
	f.Add(openFrame(h, []transfer.Span{{Off: 64, Len: 4}, {Off: 70, Len: 2}}, "note", []byte("abcdef")))
	f.Add(append(openFrame(h, []transfer.Span{{Off: 64, Len: 4}}, "", []byte("ab")), dataFrame(1, []byte("cd"))...))
	f.Add(append(openFrame(header{seq: 1, grant: 2}, []transfer.Span{{Off: 0, Len: 4}}, "", []byte("ab")), dataFrame(1, []byte("c"))...))
	f.Add(openFrame(h, []transfer.Span{{Off: 0, Len: 0}, {Off: 60, Len: 8}}, "", []byte("outside!")))
	p := listen(f, Config{}, 256)
	session := transfer.SessionID(1)
	f.Fuzz(func(t *testing.T, b []byte) {
		session++
		if err := p.tgt.OpenSession(session); err != nil {
			t.Fatal(err)
		}
		if err := p.tgt.Allow(transfer.Grant{ID: 1, Key: testKey, Session: session, Spans: []transfer.Span{{Off: 64, Len: 64}}}); err != nil {
			t.Fatal(err)
		}
		nc, err := net.Dial("tcp", p.tgt.Descriptor().Addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = nc.SetDeadline(time.Now().Add(patience))
		var out [helloLen]byte
		hello{session: session}.encode(&out)
		_, _ = nc.Write(append(out[:], b...))
		_ = nc.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, nc)
		_ = nc.Close()
		if s := recv(t, p.sink.fenced, "Fenced"); s != session {
			t.Fatalf("fenced %d, want %d", s, session)
		}
		p.tgt.CloseSession(session)
		for len(p.sink.landed) > 0 {
			<-p.sink.landed
		}
		if !bytes.Equal(p.mem[:64], make([]byte, 64)) || !bytes.Equal(p.mem[128:], make([]byte, 128)) {
			t.Fatal("stored outside the grant")
		}
	})
}
