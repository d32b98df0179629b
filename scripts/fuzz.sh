#!/usr/bin/env bash
# Runs every fuzz target with the engine, not only its seeds.
#
#   FUZZTIME=20s   for each target (default)
#   FUZZTOTAL=80   seconds for all of them together instead, divided equally; starts from the seeds
#                  alone, so that every run is alike
#
# What is found to be interesting stays in go's cache. An input that fails is printed, and left
# in testdata/fuzz of its package, where `go test` runs it from then on.
set -uo pipefail
cd "$(dirname "$0")/.."
status=0
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

targets="$(grep -ro --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' internal cmd | sed 's/:func / /' |
  while read -r file target; do echo "$(dirname "$file") $target"; done | sort)"
count="$(wc -l <<<"$targets")"
time="${FUZZTIME:-20s}"
cache="$(go env GOCACHE)/fuzz"
if [ -n "${FUZZTOTAL:-}" ]; then
  time="$((FUZZTOTAL * 1000 / count))ms"
  cache="$work/corpus"
fi
module="$(go list -m)"
echo "fuzz: $count targets, $time each"

built=""
while read -r dir target; do
  if [ "$built" != "$dir" ]; then
    built="$dir"
    if ! go test -c -fuzz . -o "$work/fuzz.test" "./$dir"; then
      status=1
      built=""
      continue
    fi
  fi
  if (cd "$dir" && "$work/fuzz.test" -test.run '^$' -test.fuzz "^$target\$" -test.fuzztime "$time" -test.fuzzminimizetime 100x \
    -test.fuzzcachedir "$cache/$module/$dir" -test.timeout 0) >"$work/log" 2>&1; then
    echo "ok   $dir $target: $(grep -o 'execs: [0-9]*' "$work/log" | tail -1)"
    continue
  fi
  # The engine may take the end of its own time for a failure (golang/go#75804, mended in 1.27): nothing but that was said, and no
  # input was found to blame.
  if ! grep -q 'testdata/fuzz/' "$work/log" && [ "$(grep -v '^fuzz: elapsed' "$work/log" | sed 's/ (.*//' | tr -s ' \n' ' ')" = "--- FAIL: $target context deadline exceeded FAIL " ]; then
    echo "ok   $dir $target: $(grep -o 'execs: [0-9]*' "$work/log" | tail -1), ended by its own deadline"
    continue
  fi
  status=1
  echo "FAIL $dir $target"
  cat "$work/log"
  grep -o 'testdata/fuzz/[^ ]*' "$work/log" | sort -u | while read -r input; do
    [ -f "$dir/$input" ] && echo "$dir/$input:" && cat "$dir/$input"
  done
done <<<"$targets"

[ "$status" -eq 0 ] || echo "fuzz: FAILED" >&2
exit "$status"
