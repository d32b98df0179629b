package edge

import (
	"math"
	"time"
)

// Bucket is a token bucket: perMinute tokens come in evenly, at most perMinute are kept, and it begins full. So a client may
// spend a minute's worth at once, and in any minute at most twice that. It knows no clock. The zero Bucket, and one of
// no tokens a minute, lets everything pass.
type Bucket struct {
	perMinute float64
	level     float64   // at time at; in [0, perMinute]
	at        time.Time // never goes back
}

// rounding is what sums of many small times may lack of a whole token.
const rounding = 1e-6

// NewBucket is a full one.
func NewBucket(perMinute int, now time.Time) Bucket {
	return Bucket{perMinute: float64(max(perMinute, 0)), level: float64(max(perMinute, 0)), at: now}
}

// Take takes a token: 0, or how long it is until there is one.
func (b *Bucket) Take(now time.Time) (wait time.Duration) {
	if b.perMinute <= 0 {
		return 0
	}
	b.fill(now)
	if b.level >= 1-rounding {
		b.level = max(b.level-1, 0)
		return 0
	}
	return max(time.Duration(math.Ceil((1-b.level)/b.perMinute*float64(time.Minute))), 1)
}

// Resize gives the bucket another rate. What is in it stays, up to the new most; so a change is no way to get more.
func (b *Bucket) Resize(perMinute int, now time.Time) {
	if b.perMinute <= 0 {
		*b = NewBucket(perMinute, now)
		return
	}
	b.fill(now)
	b.perMinute = float64(max(perMinute, 0))
	b.level = min(b.level, b.perMinute)
}

func (b *Bucket) fill(now time.Time) {
	if d := now.Sub(b.at); d > 0 {
		b.level = min(b.level+d.Minutes()*b.perMinute, b.perMinute)
		b.at = now
	}
}
