package session

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

func TestCauseCrossesFieldByField(t *testing.T) {
	full := &room.Cause{Code: room.CodeEngine, Side: room.SideRouter, Phase: "decoding", Key: room.Key{Room: 3, Gen: 4}, Peer: "h:1", Detail: "d", Retryable: true}
	if v := reflect.ValueOf(*full); true {
		for i := range v.NumField() {
			if v.Field(i).IsZero() {
				t.Fatalf("field %s of the sample is zero; give new fields a value here and a place on the wire", v.Type().Field(i).Name)
			}
		}
	}
	if got := toCause(fromCause(full)); !reflect.DeepEqual(got, full) {
		t.Errorf("%+v became %+v", full, got)
	}
	if toCause(nil) != nil || fromCause(nil) != nil {
		t.Error("nil became something")
	}
	for code := range wireCodes {
		if got := toCause(fromCause(&room.Cause{Code: code})); got.Code != code {
			t.Errorf("code %s became %s", code, got.Code)
		}
	}
}

func TestOddCausesAreKept(t *testing.T) {
	odd := &room.Cause{Code: "new_kind", Side: 200, Phase: strings.Repeat("p", 999), Key: room.Key{Room: 1 << 63},
		Peer: "\xff", Detail: strings.Repeat("é", 5000) + "\xc3"}
	got := toCause(fromCause(odd))
	if got.Code != room.CodeProtocol || !strings.Contains(got.Detail, `"new_kind"`) {
		t.Errorf("unknown code became %s, %.60q", got.Code, got.Detail)
	}
	if got.Side != 0 || got.Key != (room.Key{}) || len(got.Phase) > maxCauseShort || len(got.Detail) > maxDetail || !utf8.ValidString(got.Detail+got.Peer) {
		t.Errorf("odd values became %+v", got)
	}
}

func TestClip(t *testing.T) {
	for _, tc := range []struct {
		in   string
		n    int
		want string
	}{{"abc", 3, "abc"}, {"abcd", 3, "abc"}, {"aé", 2, "a"}, {"é", 1, ""}, {"\xff", 9, "\uFFFD"}, {"", 0, ""}} {
		if got := clip(tc.in, tc.n); got != tc.want {
			t.Errorf("clip(%q, %d) = %q, want %q", tc.in, tc.n, got, tc.want)
		}
	}
}

// discard is a handler that checks what every handler may rely on.
type discard struct{ t *testing.T }

func (d discard) Grant(_ *ServerSession, g Grant) {
	switch {
	case g.Key.Room > maxRoom, g.ID == 0, g.PageBytes < 1, len(g.Chunks) == 0, len(g.Chunks) > maxChunks, len(g.Pages) > maxPages, g.Timeout < 0:
		d.t.Errorf("bad grant let through: %+v", g)
	}
	for _, c := range g.Chunks {
		if c < 0 || c > maxBytes {
			d.t.Errorf("bad chunk let through: %+v", g)
		}
	}
	if back, err := toGrant(fromGrant(g)); err != nil || back.String() != g.String() {
		d.t.Errorf("%+v became %+v: %v", g, back, err)
	}
}

func (d discard) Abort(_ *ServerSession, key room.Key, _ transfer.GrantID, c *room.Cause) {
	if key.Room > maxRoom || c == nil || !wireCodes[c.Code] {
		d.t.Errorf("bad abort let through: %v %v", key, c)
	}
}

func (d discard) Failed(_ transfer.SessionID, key room.Key, _ transfer.GrantID, c *room.Cause) {
	if key.Room > maxRoom || c == nil || !wireCodes[c.Code] {
		d.t.Errorf("bad failure let through: %v %v", key, c)
	}
}

func (d discard) AbortAck(_ transfer.SessionID, key room.Key, _ transfer.GrantID) {
	if key.Room > maxRoom {
		d.t.Errorf("bad ack let through: %v", key)
	}
}

// serverDown and clientDown give discard the two Downs.
type serverDown struct{ discard }

func (serverDown) Down(*ServerSession, *room.Cause) {}

type clientDown struct{ discard }

func (clientDown) Down(transfer.SessionID, string, *room.Cause) {}

// fuzzSeeds are one message of each kind and direction.
func fuzzSeeds(f *testing.F) {
	add := func(m proto.Message) {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	grant := fromGrant(Grant{Key: room.Key{Room: 1, Gen: 2}, ID: 3, Pages: []uint32{4}, PageBytes: 5, Chunks: []int{5}, Digest: 6, Timeout: time.Second})
	cause := fromCause(&room.Cause{Code: room.CodeEngine, Detail: "x"})
	add(&pb.ClientMessage{Seq: 2, Body: &pb.ClientMessage_Grant{Grant: grant}})
	add(&pb.ClientMessage{Seq: 2, Body: &pb.ClientMessage_Abort{Abort: &pb.Abort{Room: 1, Cause: cause}}})
	add(&pb.ClientMessage{Seq: 2, Body: &pb.ClientMessage_Ack{Ack: &pb.Ack{Seq: 1}}})
	add(&pb.ClientMessage{Seq: 2, Body: &pb.ClientMessage_Ping{Ping: &pb.Ping{}}})
	add(&pb.ClientMessage{Seq: 2, Body: &pb.ClientMessage_Bye{Bye: &pb.Bye{Cause: cause}}})
	add(&pb.ClientMessage{Seq: 2, Body: &pb.ClientMessage_Hello{Hello: fromHello(hello{session: 1, wait: 1,
		client: Identity{WorkerID: "w", Epoch: 1}, offers: []transfer.Descriptor{{Kind: "tcp", Meta: map[string]string{"k": "v"}}}})}})
	add(&pb.ServerMessage{Seq: 2, Body: &pb.ServerMessage_Failed{Failed: &pb.Failed{Room: 1, Cause: cause}}})
	add(&pb.ServerMessage{Seq: 2, Body: &pb.ServerMessage_AbortAck{AbortAck: &pb.AbortAck{Room: 1, GrantId: 2}}})
	add(&pb.ServerMessage{Seq: 1, Body: &pb.ServerMessage_HelloReply{HelloReply: &pb.HelloReply{Identity: &pb.Identity{}}}})
	add(&pb.ServerMessage{Seq: 1, Body: &pb.ServerMessage_Refused{Refused: &pb.Refused{Cause: cause, Field: "engine"}}})
	f.Add([]byte{})
}

// fuzzLink receives b as its next message, whatever number it bears.
func fuzzLink(t *testing.T, l *link, b body) {
	err := l.receive(l.ledger.lastReceived+1, b)
	var c *room.Cause
	if errors.As(err, &c) && c.Code == room.CodeInternal && strings.Contains(c.Detail, "panicked") {
		t.Errorf("message %v: %v", b, err)
	}
}

// fuzzStream gives one message.
type clientStream struct {
	pb.Session_ConnectClient
	m *pb.ServerMessage
}

func (s clientStream) Recv() (*pb.ServerMessage, error) { return s.m, nil }

type serverStream struct {
	pb.Session_ConnectServer
	m *pb.ClientMessage
}

func (s serverStream) Recv() (*pb.ClientMessage, error) { return s.m, nil }
func (s serverStream) Context() context.Context         { return context.Background() }

// FuzzReceive feeds any bytes that are a message to both ends, live and before the hello.
func FuzzReceive(f *testing.F) {
	fuzzSeeds(f)
	log := slog.New(slog.DiscardHandler)
	f.Fuzz(func(t *testing.T, data []byte) {
		var cm pb.ClientMessage
		if proto.Unmarshal(data, &cm) == nil {
			srv := NewServer(ServerConfig{Identity: Identity{WorkerID: "p", Epoch: 1}, Handler: serverDown{discard{t}}, Log: log})
			w := serverWire{serverStream{m: &cm}}
			if h, refused, err := srv.hear(t.Context(), w); err == nil && refused == nil {
				if back, err := toHello(fromHello(h)); err != nil || back.session != h.session || len(back.offers) != len(h.offers) {
					t.Errorf("%+v became %+v: %v", h, back, err)
				}
			}
			srv.wg.Wait()
			sess := &ServerSession{server: srv, id: 1, client: Identity{WorkerID: "d"}}
			sess.link = newLink(w, srv.t, srv.m, log, room.SideSender, "d")
			sess.link.handle = sess.handle
			_, b, _ := w.recv()
			fuzzLink(t, sess.link, b)
		}
		var sm pb.ServerMessage
		if proto.Unmarshal(data, &sm) == nil {
			c := NewClient(ClientConfig{Identity: Identity{WorkerID: "d", Epoch: 1}, Handler: clientDown{discard{t}}, Log: log})
			w := clientWire{stream: clientStream{m: &sm}}
			s := &ClientSession{client: c, addr: "p:1", id: 1}
			seq, b, _ := w.recv()
			if cause := s.answered(w, seq, b); cause != nil && !utf8.ValidString(cause.Detail) {
				t.Errorf("detail %q", cause.Detail)
			}
			s.link = newLink(w, c.t, c.m, log, room.SideReceiver, "p:1")
			s.link.handle = s.handle
			fuzzLink(t, s.link, b)
		}
	})
}

// FuzzCause: any cause can be sent, and arrives as something that can be sent again unchanged.
func FuzzCause(f *testing.F) {
	f.Add("aborted", uint8(1), "transferring", uint64(7), uint32(1), "h:1", "detail", true)
	f.Add("\xff", uint8(255), "\x00", uint64(1<<64-1), uint32(0), strings.Repeat("é", 200), strings.Repeat("€", 2000), false)
	f.Fuzz(func(t *testing.T, code string, side uint8, phase string, id uint64, gen uint32, peer, detail string, retry bool) {
		c := &room.Cause{Code: room.Code(code), Side: room.Side(side), Phase: phase, Key: room.Key{Room: id, Gen: gen}, Peer: peer, Detail: detail, Retryable: retry}
		b, err := proto.Marshal(fromCause(c))
		if err != nil {
			t.Fatalf("%+v cannot be sent: %v", c, err)
		}
		var m pb.Cause
		if err := proto.Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}
		once := toCause(&m)
		if twice := toCause(fromCause(once)); !reflect.DeepEqual(once, twice) {
			t.Errorf("%+v became %+v on the second way", once, twice)
		}
	})
}
