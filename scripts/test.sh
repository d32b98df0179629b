#!/usr/bin/env bash
# Runs every test: packages under the race detector, then the real processes (which run
# a race-built binary where that does not distort what is tested). BATON_PROVE=1: the long forms.
set -uo pipefail
cd "$(dirname "$0")/.."
long="${BATON_PROVE:+60m}"
status=0

echo "== packages, with -race"
packages="$(go list ./... | grep -v -e /internal/e2e$)"
# shellcheck disable=SC2086
go test -race -timeout "${long:-15m}" $packages || status=1

echo "== real processes"
go test -timeout "${long:-25m}" -v ./internal/e2e 2>&1 | grep -E '^(=== RUN|--- |PASS|FAIL|ok|panic|\s+---)|skip|SKIP|Skip|_test\.go' | grep -v '^=== RUN' || true
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1

if [ "$status" -ne 0 ]; then
  echo "test: FAILED" >&2
fi
exit "$status"
