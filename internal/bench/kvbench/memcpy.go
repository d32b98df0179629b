package kvbench

import (
	"context"
	"errors"

	"github.com/baton-pd/baton/internal/kv"
)

// memcpy is what one thread of this process can do: the same blocks copied between two mappings of its own, the
// yardstick of shm.
type memcpy struct {
	rooms    int
	pools    []*kv.Pool
	src, dst []byte
}

// Memcpy maps its memory, w.Size bytes twice.
func Memcpy(w Work) (System, error) {
	m := &memcpy{rooms: w.Rooms}
	for range 2 {
		pool, err := w.pool("bench memcpy")
		if err != nil {
			return nil, errors.Join(err, m.Close())
		}
		m.pools = append(m.pools, pool)
	}
	m.src, _ = m.pools[0].Memory()
	m.dst, _ = m.pools[1].Memory()
	return m, nil
}

func (m *memcpy) Name() string { return "memcpy" }

func (m *memcpy) Round(_ context.Context, block int, seed uint64) (Round, error) {
	to := places(len(m.src)/block, m.rooms)
	for i := range to {
		fill(m.src[i*block:(i+1)*block], seed, i)
	}
	own, began := cpu(), now()
	for i, at := range to {
		copy(m.dst[at*block:(at+1)*block], m.src[i*block:(i+1)*block])
	}
	r := Round{Rooms: m.rooms, Bytes: int64(len(to)) * int64(block), Seconds: float64(now()-began) / 1e9, CPU: cpu() - own, Verified: true}
	for i, at := range to {
		if wrong(m.dst[at*block:(at+1)*block], seed, i) {
			r.Verified = false
		}
	}
	return r, nil
}

func (m *memcpy) Singles(context.Context, int, int) ([]int64, error) { return nil, nil }

func (m *memcpy) Close() error {
	var err error
	for _, p := range m.pools {
		err = errors.Join(err, p.Close())
	}
	return err
}
