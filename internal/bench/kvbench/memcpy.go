package kvbench

import (
	"slices"
)

// Memcpy is what one thread of this process can do: the same blocks copied between two
// mappings of its own, the yardstick of shm.
func Memcpy(w Work) ([]Row, error) {
	var maps [2][]byte
	for i := range maps {
		pool, err := w.pool("bench memcpy")
		if err != nil {
			return nil, err
		}
		defer func() { _ = pool.Close() }()
		maps[i], _ = pool.Memory()
	}
	src, dst := maps[0], maps[1]
	var rows []Row
	for _, block := range w.Blocks {
		to := places(len(src)/block, w.Rooms)
		row := Row{Transport: "memcpy", BlockBytes: block, Rooms: w.Rooms, Rounds: w.Rounds, Verified: true}
		var rates []float64
		var used, gb float64
		for round := range w.Rounds + 1 {
			seed := uint64(round+1)*1_000_003 + uint64(block)
			for i := range to {
				fill(src[i*block:(i+1)*block], seed, i)
			}
			own, began := cpu(), now()
			for i, at := range to {
				copy(dst[at*block:(at+1)*block], src[i*block:(i+1)*block])
			}
			took := float64(now()-began) / 1e9
			own = cpu() - own
			for i, at := range to {
				if wrong(dst[at*block:(at+1)*block], seed, i) {
					row.Verified = false
				}
			}
			if round > 0 {
				size := float64(len(to)) * float64(block) / 1e9
				rates, used, gb = append(rates, size/took), used+own, gb+size
			}
		}
		slices.Sort(rates)
		row.GBPerS, row.MinGBPS, row.MaxGBPS, row.CPUPerGB = rates[len(rates)/2], rates[0], rates[len(rates)-1], used/gb
		rows = append(rows, row)
	}
	return rows, nil
}
