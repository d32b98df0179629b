package tcp

import (
	"bytes"
	"context"
	"errors"
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

// FuzzSource lets a target say anything, from its welcome on. Each write of the source ends
// once, and well only if the target said so.
func FuzzSource(f *testing.F) {
	var ok [welcomeLen]byte
	statusOK.encode(&ok)
	good := append(ok[:], appendAnswer(appendAnswer(nil, answer{seq: 1}), answer{seq: 2, code: codeGrant})...)
	f.Add(good)
	f.Add(good[:welcomeLen+answerLen+3])
	f.Add(append(ok[:], appendAnswer(nil, answer{seq: 2})...))
	f.Add(append(ok[:], appendAnswer(nil, answer{seq: 1, code: 99})...))
	statusBusy.encode(&ok)
	f.Add(ok[:])
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = ln.Close() })
	tr, src := New(Config{Handshake: patience}), make([]byte, 8)
	f.Fuzz(func(t *testing.T, b []byte) {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			bulk := greeted(ln, b)
			if bulk == nil {
				return
			}
			defer bulk.Close()
			var in [welcomeLen]byte
			if copy(in[:], b); len(b) < welcomeLen {
				return
			}
			if st, err := decodeWelcome(&in); err != nil || st != statusOK {
				return // Dial ends with the first connection
			}
			nc := greeted(ln, b) // the short writes come here
			if nc == nil {
				return
			}
			defer nc.Close()
			if len(b) > welcomeLen { // answers come when there is something to answer
				_, _ = io.ReadFull(nc, make([]byte, 2*(headerLen+entryLen+len(src))))
				_, _ = nc.Write(b[welcomeLen:])
			}
			_ = nc.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, nc)
		}()
		defer func() { <-ended }()
		peer, err := tr.Dial(context.Background(), transfer.Descriptor{Kind: "tcp", Addr: ln.Addr().String()}, 1)
		if err != nil {
			return
		}
		type verdict struct {
			seq uint64
			err error
		}
		verdicts := make(chan verdict, 4)
		for seq := range uint64(2) {
			done := func(err error) { verdicts <- verdict{seq + 1, err} }
			if peer.Post(transfer.Write{Grant: 1, Segments: []transfer.Segment{{Src: src}}, Done: done}) != nil {
				done(transfer.ErrPeerLost)
			}
		}
		recv(t, peer.Down(), "the end of the connection")
		if err := peer.Err(); !errors.Is(err, transfer.ErrPeerLost) {
			t.Errorf("ended with %v", err)
		}
		_ = peer.Close()
		if len(verdicts) != 2 {
			t.Fatalf("%d verdicts of 2 writes", len(verdicts))
		}
		for range 2 {
			v := <-verdicts
			if v.err == nil && !bytes.Contains(b, appendAnswer(nil, answer{seq: v.seq})) {
				t.Fatalf("write %d completed, which the target never said", v.seq)
			}
		}
	})
}

// greeted takes a connection and answers its hello with the first bytes of b; nil: there was none.
func greeted(ln net.Listener, b []byte) net.Conn {
	nc, err := ln.Accept()
	if err != nil {
		return nil
	}
	_ = nc.SetDeadline(time.Now().Add(patience))
	_, _ = io.ReadFull(nc, make([]byte, helloLen))
	_, _ = nc.Write(b[:min(len(b), welcomeLen)])
	return nc
}
