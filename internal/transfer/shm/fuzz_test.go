package shm

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// FuzzSource sends arbitrary bytes after a good handshake. The target must go on serving
// others, and fence the session when the source has gone.
func FuzzSource(f *testing.F) {
	note := message{kind: kindDone, value: 1, grant: 1, notify: true, notifyN: 2}
	f.Add(append(note.append(nil), "hi"...))
	for _, m := range goodMessages {
		f.Add(m.append(nil))
	}
	p := listen(f, Config{}, 4096)
	session := transfer.SessionID(1)
	f.Fuzz(func(t *testing.T, b []byte) {
		session++
		if err := p.tgt.OpenSession(session); err != nil {
			t.Fatal(err)
		}
		if err := p.tgt.Allow(transfer.Grant{ID: 1, Key: testKey, Session: session, Spans: []transfer.Span{{Off: 0, Len: 8}}}); err != nil {
			t.Fatal(err)
		}
		nc, err := net.Dial("unix", p.tgt.Descriptor().Addr)
		if err != nil {
			t.Fatal(err)
		}
		uc := nc.(*net.UnixConn)
		_ = uc.SetDeadline(time.Now().Add(patience))
		maps, err := greet(uc, session, 4096)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = uc.Write(b)
		_ = uc.CloseWrite()
		_, _ = io.Copy(io.Discard, uc)
		maps.unmap()
		_ = uc.Close()
		if s := recv(t, p.sink.fenced, "Fenced"); s != session {
			t.Fatalf("fenced %d, want %d", s, session)
		}
		p.tgt.CloseSession(session)
		for len(p.sink.landed) > 0 {
			if n := len(<-p.sink.landed); n > transfer.MaxNotify {
				t.Fatalf("notification of %d bytes", n)
			}
		}
	})
}
