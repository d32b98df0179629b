//go:build race

package model

// raceBuild: nothing in this package is concurrent, and -race makes it six times slower; the
// whole worlds are for builds without it (scripts/test.sh).
const raceBuild = true
