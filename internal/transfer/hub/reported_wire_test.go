package hub_test

import (
	"math/rand/v2"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/hub"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

// bad are messages that no decode worker sends. The last one ends its session, the others a room of their own at most.
func bad(i int) *pb.ClientMessage {
	grant := func(g *pb.Grant) *pb.ClientMessage { return &pb.ClientMessage{Body: &pb.ClientMessage_Grant{Grant: g}} }
	return []*pb.ClientMessage{
		grant(&pb.Grant{Room: 500, GrantId: 1, Pages: []uint32{7, 7, 7}, PageBytes: -1, Chunks: []int64{4}}),
		grant(&pb.Grant{Room: 501, GrantId: 2, PageBytes: 1, Chunks: []int64{1 << 62}}),
		grant(&pb.Grant{Room: 505, GrantId: 3, Pages: []uint32{0}, PageBytes: pageBytes, Chunks: []int64{chunkBytes}}), // too few pages; waits for its room
		grant(&pb.Grant{Room: 502, Chunks: []int64{1}, PageBytes: 1}),
		{Body: &pb.ClientMessage_Abort{Abort: &pb.Abort{Room: 503, GrantId: 77}}},
		{Body: &pb.ClientMessage_Ping{Ping: &pb.Ping{}}},
		grant(&pb.Grant{Room: 504, GrantId: 9, PageBytes: 1 << 41, Chunks: []int64{1}}),
		{},
	}[i]
}

// frames opens a session of its own and says n messages, the first of which is a hello, the last of which has no body.
func (w *world) frames(n int) {
	w.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+w.addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	stream, err := pb.NewSessionClient(conn).Connect(patient(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	id := transfer.SessionID(session.NewEpoch())
	offers, err := w.receivers.Offer(id)
	if err != nil {
		w.t.Fatal(err)
	}
	defer w.receivers.Flush()
	defer w.receivers.Down(id, w.addr, gone())
	hello := &pb.Hello{ProtocolVersion: session.ProtocolVersion, SessionId: uint64(id), WaitNs: int64(patience),
		Identity: &pb.Identity{WorkerId: "raw", Epoch: 9, Fingerprint: &pb.Fingerprint{Engine: print.Engine, ModelDigest: print.ModelDigest, KvLayout: print.KVLayout,
			Attention: print.Attention, ChunkTokens: int64(print.ChunkTokens)}},
		Offers: []*pb.Descriptor{{Kind: offers[0].Kind, Addr: offers[0].Addr, Size: offers[0].Size}}}
	for i := range n {
		m := bad(max(i-1, 0))
		switch {
		case n > 1 && i == 0:
			m = &pb.ClientMessage{Body: &pb.ClientMessage_Hello{Hello: hello}}
		case n > 1 && i == n-1:
			m = bad(7)
		case n == 1:
			m = bad(0) // without a hello
		}
		m.Seq = uint64(i + 1)
		if err := stream.Send(m); err != nil {
			break // the server has ended it already
		}
		if m.GetHello() != nil {
			if r, err := stream.Recv(); err != nil || r.GetHelloReply() == nil {
				w.t.Fatalf("answer to the hello: %v, %v", r, err)
			}
		}
	}
	_ = stream.CloseSend()
	for err == nil { // until the server has had enough
		_, err = stream.Recv()
	}
}

// noise throws bytes at the session port.
func (w *world) noise(n int) {
	w.t.Helper()
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	c, err := net.Dial("tcp", w.addr)
	if err != nil {
		w.t.Fatal(err)
	}
	_, _ = c.Write(b) // the server may hang up in the middle
	_ = c.Close()
}

// The report's loop is that of the session port here: 0, 1, 2 and 9 messages, one byte, 16 MiB of noise. Then the valid grant
// of a room that waited all the time is applied. The other loop is that of the notifications of a writer that is let in.
func TestReportedK9Garbage(t *testing.T) {
	t.Run("session port", func(t *testing.T) {
		w := newWorld(t, options{})
		up, su := w.receive(2, 2), w.send(2, 2)
		await(t, "grant", su.Granted())
		w.chunk(su, 2, 0)
		waiting := w.send(1, 1)
		for _, n := range []int{0, 1, 2, 9} {
			w.frames(n)
		}
		w.noise(1)
		w.noise(16 << 20)
		r := w.receive(1, 1)
		await(t, "grant", waiting.Granted())
		if waiting.State() != room.StateWaitingForInput {
			t.Fatalf("the waiting room: %v, %v", waiting.State(), waiting.Err())
		}
		w.chunk(waiting, 1, 0)
		await(t, "the waiting room's end", r.Done())
		holds(t, r, 0, 1)
		w.chunk(su, 2, 1) // on the session that was there before all of it
		await(t, "the running room's end", up.Done())
		if up.Err() != nil || r.Err() != nil {
			t.Errorf("%v, %v", up.Err(), r.Err())
		}
		for _, x := range []interface{ Release() }{up, su, r, waiting} {
			x.Release()
		}
		w.drained()
		eventually(t, "no parked grant", func() bool { rooms, parked := w.senders.Indexed(); return rooms+parked == 0 })
	})
	t.Run("notifications", func(t *testing.T) {
		grants := make(chan tapped, 16)
		w := newWorld(t, options{handler: func(h *hub.Senders) session.ServerHandler { return tap{h, grants} }})
		live, sl := w.receive(1, 1), w.send(1, 1)
		await(t, "grant", sl.Granted())
		await(t, "grant", grants)
		for i, n := range []int{0, 1, 2, 9, 31, 33, transfer.MaxNotify} {
			id := uint64(10 + i)
			r, s := w.receive(id, 1), w.send(id, 1)
			await(t, "grant", s.Granted())
			w.receivers.Landed(await(t, "grant", grants).grant.ID, make([]byte, n))
			failed(t, "receiver", r.State(), r.Err(), room.CodeTransferFailed)
			r.Release()
			s.Release()
		}
		w.receivers.Landed(transfer.GrantID(1), []byte("of no grant"))
		w.chunk(sl, 1, 0)
		await(t, "the other room's end", live.Done())
		if live.Err() != nil {
			t.Errorf("the other room: %v", live.Err())
		}
		live.Release()
		sl.Release()
		w.drained()
	})
}
