package session

import (
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	pb "github.com/baton-pd/baton/proto/baton/v1"
)

// body is what a message says: one of the oneof's messages, without its envelope.
type body = proto.Message

// wire is one end of a stream, with the two directions' envelopes hidden. One goroutine
// may send while another receives.
type wire interface {
	send(seq uint64, b body) error
	// recv gives a nil body for a message whose body is missing or not known.
	recv() (seq uint64, b body, err error)
}

// clientWire is the decode side's end.
type clientWire struct {
	stream grpc.BidiStreamingClient[pb.ClientMessage, pb.ServerMessage]
}

func (w clientWire) send(seq uint64, b body) error {
	m := &pb.ClientMessage{Seq: seq}
	switch b := b.(type) {
	case *pb.Hello:
		m.Body = &pb.ClientMessage_Hello{Hello: b}
	case *pb.Grant:
		m.Body = &pb.ClientMessage_Grant{Grant: b}
	case *pb.Abort:
		m.Body = &pb.ClientMessage_Abort{Abort: b}
	case *pb.Ack:
		m.Body = &pb.ClientMessage_Ack{Ack: b}
	case *pb.Ping:
		m.Body = &pb.ClientMessage_Ping{Ping: b}
	case *pb.Bye:
		m.Body = &pb.ClientMessage_Bye{Bye: b}
	default:
		return fmt.Errorf("a client does not send %T", b)
	}
	return w.stream.Send(m)
}

func (w clientWire) recv() (uint64, body, error) {
	m, err := w.stream.Recv()
	if err != nil {
		return 0, nil, err
	}
	switch b := m.GetBody().(type) {
	case *pb.ServerMessage_HelloReply:
		return m.GetSeq(), b.HelloReply, nil
	case *pb.ServerMessage_Refused:
		return m.GetSeq(), b.Refused, nil
	case *pb.ServerMessage_Failed:
		return m.GetSeq(), b.Failed, nil
	case *pb.ServerMessage_AbortAck:
		return m.GetSeq(), b.AbortAck, nil
	case *pb.ServerMessage_Ack:
		return m.GetSeq(), b.Ack, nil
	case *pb.ServerMessage_Ping:
		return m.GetSeq(), b.Ping, nil
	default:
		return m.GetSeq(), nil, nil
	}
}

// serverWire is the prefill side's end.
type serverWire struct {
	stream grpc.BidiStreamingServer[pb.ClientMessage, pb.ServerMessage]
}

func (w serverWire) send(seq uint64, b body) error {
	m := &pb.ServerMessage{Seq: seq}
	switch b := b.(type) {
	case *pb.HelloReply:
		m.Body = &pb.ServerMessage_HelloReply{HelloReply: b}
	case *pb.Refused:
		m.Body = &pb.ServerMessage_Refused{Refused: b}
	case *pb.Failed:
		m.Body = &pb.ServerMessage_Failed{Failed: b}
	case *pb.AbortAck:
		m.Body = &pb.ServerMessage_AbortAck{AbortAck: b}
	case *pb.Ack:
		m.Body = &pb.ServerMessage_Ack{Ack: b}
	case *pb.Ping:
		m.Body = &pb.ServerMessage_Ping{Ping: b}
	default:
		return fmt.Errorf("a server does not send %T", b)
	}
	return w.stream.Send(m)
}

func (w serverWire) recv() (uint64, body, error) {
	m, err := w.stream.Recv()
	if err != nil {
		return 0, nil, err
	}
	switch b := m.GetBody().(type) {
	case *pb.ClientMessage_Hello:
		return m.GetSeq(), b.Hello, nil
	case *pb.ClientMessage_Grant:
		return m.GetSeq(), b.Grant, nil
	case *pb.ClientMessage_Abort:
		return m.GetSeq(), b.Abort, nil
	case *pb.ClientMessage_Ack:
		return m.GetSeq(), b.Ack, nil
	case *pb.ClientMessage_Ping:
		return m.GetSeq(), b.Ping, nil
	case *pb.ClientMessage_Bye:
		return m.GetSeq(), b.Bye, nil
	default:
		return m.GetSeq(), nil, nil
	}
}

// kindOf names a body in metrics and errors.
func kindOf(b body) string {
	switch b.(type) {
	case *pb.Hello:
		return "hello"
	case *pb.HelloReply:
		return "hello_reply"
	case *pb.Refused:
		return "refused"
	case *pb.Grant:
		return "grant"
	case *pb.Abort:
		return "abort"
	case *pb.Failed:
		return "failed"
	case *pb.AbortAck:
		return "abort_ack"
	case *pb.Ack:
		return "ack"
	case *pb.Ping:
		return "ping"
	case *pb.Bye:
		return "bye"
	default:
		return "unknown"
	}
}
