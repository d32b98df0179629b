#!/usr/bin/env bash
# Installs what a step needs and this machine lacks: deps.sh build|run|test.
# Uses the ordinary clients by package name; prints nothing when all is there.
set -euo pipefail

need() { # need COMMAND PACKAGE: install Debian's PACKAGE if COMMAND is missing
  command -v "$1" >/dev/null 2>&1 || missing+=("$2")
}

install_missing() {
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "deps: please install: ${missing[*]} (Debian package names), then run make again" >&2
    exit 1
  fi
  echo "deps: installing ${missing[*]}"
  # Debian starts what is a service (prometheus) when it is installed; nothing here wants that.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

missing=()
case "${1:-}" in
build)
  if ! command -v go >/dev/null; then
    echo "deps: Go 1.26 or newer is needed to build (the go command was not found)" >&2
    exit 1
  fi
  ;;
run)
  need npm npm
  need python3 python3
  python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
  ldconfig -p 2>/dev/null | grep -q 'libffi\.so\.8' || missing+=(libffi8)
  ldconfig -p 2>/dev/null | grep -q 'libgomp\.so\.1' || missing+=(libgomp1)
  install_missing
  ;;
test)
  need gcc gcc
  ldconfig -p 2>/dev/null | grep -q 'libstdc++\.so\.6' || missing+=(libstdc++6) # of the NIXL library
  need curl curl
  need etcd etcd-server
  command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || need chromium chromium # of the router's page
  need prometheus prometheus # promtool is in the same package
  need promtool prometheus
  need python3 python3
  python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing+=(python3-venv)
  install_missing
  # The OpenAI Python client, pinned, in a virtual environment of the tests' own.
  venv=.cache/venv
  want="$(sha256sum scripts/test-requirements.txt | cut -d' ' -f1)"
  if [ ! -f "$venv/.ready-$want" ]; then
    echo "deps: making $venv (OpenAI Python client)"
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: -r scripts/test-requirements.txt
    touch "$venv/.ready-$want"
  fi
  # SGLang's routers, which Baton's workers are tested behind.
  want="$(sha256sum scripts/router-requirements.txt | cut -d' ' -f1)"
  if [ ! -f "$venv/.routers-$want" ]; then
    echo "deps: adding sglang-router and smg to $venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps --require-hashes -r scripts/router-requirements.txt
    touch "$venv/.routers-$want"
  fi
  # The real SGLang code from PyPI, for interop tests: its driver and list of packages are in the shared
  # folder beside the checkout. Kept in Baton's cache (some 600 MB).
  peers="${BATON_SHARED:-../shared}/peers/sglang"
  if [ ! -x "$peers/setup.sh" ]; then
    echo "deps: no $peers (set BATON_SHARED): the tests against the real SGLang code say that they are skipped"
  else
    peer="${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}/sglang-peer-0.5.23"
    want="$(sha256sum "$peers/setup.sh" | cut -d' ' -f1)"
    if [ ! -f "$peer/.ready-$want" ]; then
      echo "deps: making $peer (SGLang 0.5.23 and NIXL, without torch)"
      rm -rf "$peer"
      "$peers/setup.sh" "$peer"
      touch "$peer/.ready-$want"
    fi
  fi
  ;;
*)
  echo "usage: deps.sh build|run|test" >&2
  exit 2
  ;;
esac
