package mem

import (
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

func TestMain(m *testing.M) {
	transfertest.Main(m, func() transfer.Transport { return New(nil) })
}

func TestConformance(t *testing.T) {
	transfertest.Run(t, transfertest.Options{
		New: func(*testing.T) (transfer.Transport, transfer.Transport) {
			r := NewRegistry()
			return New(r), New(r)
		},
		Caps: transfer.Caps{Fences: true},
	})
}
