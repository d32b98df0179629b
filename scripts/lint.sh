#!/usr/bin/env bash
# Formatting, vet, and modules in order.
set -euo pipefail
bad="$(gofmt -l cmd internal proto)"
if [ -n "$bad" ]; then
  echo "lint: run gofmt -w on:" >&2
  echo "$bad" >&2
  exit 1
fi
go vet ./...
