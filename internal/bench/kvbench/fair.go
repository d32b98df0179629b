package kvbench

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/baton-pd/baton/internal/transfer"
)

// FairRow says what a large transfer does to small ones of another room.
type FairRow struct {
	Transport string `json:"transport"`
	// One-way times of a 64 KiB write with a notification, in microseconds.
	AloneP50US  float64 `json:"alone_p50_us"`
	AloneMaxUS  float64 `json:"alone_max_us"`
	BesideP50US float64 `json:"beside_p50_us"`
	BesideP99US float64 `json:"beside_p99_us"`
	BesideMaxUS float64 `json:"beside_max_us"`
	// Beside is how many small writes were timed while the large transfer went on.
	Beside int `json:"beside"`
}

const (
	fairBlock = 64 << 10
	fairLarge = 1 << 30 // bytes of the large transfer
)

// Fair times small writes of one room alone and while another room moves 1 GiB, posted as one
// write for each pass over its memory, so that nothing but the transport itself can share.
func Fair(ctx context.Context, tr transfer.Transport, name string, w Work, in io.Writer, out io.Reader) (FairRow, error) {
	row := FairRow{Transport: name}
	s, err := Open(ctx, tr, name, w, in, out)
	if err != nil {
		return row, err
	}
	defer func() { _ = s.Close() }()
	const rooms = 2
	if err := s.grant(rooms, fairBlock); err != nil {
		return row, fmt.Errorf("kvbench: %w", err)
	}
	to, per := s.to, len(s.to)/rooms
	fill(s.bytes, 1, 0) // pages that are not there yet are no part of what is measured
	alone, err := s.singles(ctx, 1000, 1, fairBlock, to[per:])
	if err != nil {
		return row, err
	}
	row.AloneP50US, row.AloneMaxUS = quantile(alone, 0.5), quantile(alone, 1)

	large := make([]transfer.Segment, per)
	for i := range large {
		large[i] = transfer.Segment{Off: uint64(to[i]) * fairBlock, Src: s.bytes[i*fairBlock : (i+1)*fairBlock]}
	}
	passes := fairLarge / (per * fairBlock)
	done := make(chan error, passes)
	for range passes {
		err := s.peer.Post(transfer.Write{Grant: firstGrant, Segments: large, Done: func(err error) { done <- err }})
		if err != nil {
			return row, err
		}
	}
	var beside []int64
	for left := passes; left > 0; {
		got, err := s.singles(ctx, 10, 1, fairBlock, to[per:])
		if err != nil {
			return row, err
		}
		for more := true; more; {
			select {
			case err := <-done:
				if left--; err != nil {
					return row, err
				}
			default:
				more = false
			}
		}
		if left > 0 { // all ten went beside it
			beside = append(beside, got...)
		}
	}
	if row.Beside = len(beside); row.Beside == 0 {
		return row, fmt.Errorf("kvbench: the large transfer of %s ended before a small one", name)
	}
	slices.Sort(beside)
	row.BesideP50US, row.BesideP99US, row.BesideMaxUS = quantile(beside, 0.5), quantile(beside, 0.99), quantile(beside, 1)
	return row, nil
}
