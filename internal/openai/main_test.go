package openai

import (
	"testing"

	"go.uber.org/goleak"
)

// gonja starts goroutines for some of its loops; none may be left.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
