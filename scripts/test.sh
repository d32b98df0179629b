#!/usr/bin/env bash
# Runs every test: packages under the race detector, fuzz targets for a moment each, then the real processes (which run
# a race-built binary where that does not distort what is tested). BATON_PROVE=1: the long forms.
set -uo pipefail
cd "$(dirname "$0")/.."
long="${BATON_PROVE:+90m}"
export BATON_NEED_MODEL=1 # setup has run: a test that finds no model has failed
status=0

echo "== packages, with -race"
# shellcheck disable=SC2046
go test -race -timeout "${long:-15m}" $(go list ./... | grep -v '/internal/e2e$') || status=1

echo "== fuzz targets"
if [ -n "${BATON_PROVE:-}" ]; then FUZZTIME=20s scripts/fuzz.sh; else FUZZTOTAL=80 scripts/fuzz.sh; fi || status=1

# Sequential searches that the race detector has nothing to say about, and slows down six times.
echo "== worlds of the explorer"
go test ${BATON_PROVE:+-v} -timeout "${long:-15m}" ./internal/model || status=1 # -v: the long form prints each world's figures

echo "== real processes"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
if go test -timeout "${long:-25m}" -v ./internal/e2e >"$log" 2>&1; then
  grep -E '^\s*--- |^\s+\S+_test\.go:[0-9]+: .*(skip|need)|^(ok|PASS)' "$log"
else
  status=1
  cat "$log"
fi

[ "$status" -eq 0 ] || echo "test: FAILED" >&2
exit "$status"
