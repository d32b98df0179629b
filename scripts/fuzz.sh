#!/usr/bin/env bash
# Runs every fuzz target for FUZZTIME each (default 20s).
set -euo pipefail
time="${FUZZTIME:-20s}"
grep -rl --include='*_test.go' '^func Fuzz' internal cmd | while read -r file; do
  dir="./$(dirname "$file")"
  grep -o '^func Fuzz[A-Za-z0-9_]*' "$file" | sed 's/^func //' | while read -r target; do
    echo "fuzz: $dir $target $time"
    go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" "$dir"
  done
done
