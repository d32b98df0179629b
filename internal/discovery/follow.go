package discovery

import (
	"context"
	"fmt"
	"time"
)

// Follow reads a whole set, tells it, and watches for changes from the version that was read on, over and over until ctx ends.
// A watch that ends without an error is begun anew at once; an error is reported under name, and followed by a pause that
// doubles from retry to most while nothing can be read.
func Follow[V any](ctx context.Context, name string, retry, most time.Duration, report Report,
	read func(context.Context) (V, error), tell func(Report), watch func(context.Context, V, Report) error) {
	pause := retry
	for ctx.Err() == nil {
		version, err := read(ctx)
		if err == nil {
			tell(report)
			pause = retry
			err = watch(ctx, version, report)
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		report(nil, fmt.Errorf("%s: %w", name, err))
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
		pause = min(2*pause, most)
	}
}
