package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// sizeUnits are the suffixes of [ParseSize], in bytes.
var sizeUnits = map[string]int64{
	"": 1, "b": 1,
	"k": 1 << 10, "kib": 1 << 10, "kb": 1e3,
	"m": 1 << 20, "mib": 1 << 20, "mb": 1e6,
	"g": 1 << 30, "gib": 1 << 30, "gb": 1e9,
}

// ParseSize reads a number of bytes such as "512MiB", "64k", "2GB" or "4096".
// k, m and g alone mean powers of 1024. The result is never negative.
func ParseSize(s string) (int64, error) {
	text := strings.TrimSpace(s)
	digits := text[:len(text)-len(strings.TrimLeft(text, "0123456789"))]
	unit, known := sizeUnits[strings.ToLower(strings.TrimSpace(text[len(digits):]))]
	if digits == "" || !known {
		return 0, fmt.Errorf("size %q: use a whole number with B, k, KiB, MiB or GiB", s)
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n > math.MaxInt64/unit {
		return 0, fmt.Errorf("size %q is too large", s)
	}
	return n * unit, nil
}
