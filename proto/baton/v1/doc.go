// Package batonv1 is the wire format of the session between decode and prefill
// workers, generated from session.proto. Only internal/session uses it.
package batonv1

//go:generate protoc --proto_path=../../.. --go_out=../../.. --go_opt=paths=source_relative --go-grpc_out=../../.. --go-grpc_opt=paths=source_relative proto/baton/v1/session.proto
