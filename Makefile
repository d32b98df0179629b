# Two targets do everything on a fresh machine: `make up` and `make test`.
GO       ?= go
BIN      := bin/baton
VERSION  := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS  := -X main.version=$(VERSION)
UPFLAGS  ?=

.PHONY: up test demo build setup deps testdeps lint race fuzz prove chaos bench generate clean

up: setup ## serve a real small model with prefill and decode on separate workers
	$(BIN) up $(UPFLAGS)

demo: setup ## the short proof: answer, break, error with cause, recovery
	$(BIN) demo

build: ## leaves bin/baton
	@scripts/deps.sh build
	@mkdir -p bin
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/baton

deps:
	@scripts/deps.sh run

setup: build deps ## fetches the pinned engine library and the default model, verified
	$(BIN) setup

testdeps: setup
	@scripts/deps.sh test
	@$(BIN) setup --with nixl || echo "testdeps: no NIXL library here; the tests that need it say that they are skipped"

lint:
	@scripts/lint.sh

test: testdeps lint ## every test; -race where it matters
	@scripts/test.sh

prove: testdeps ## the slow, full forms of the proofs
	BATON_PROVE=1 scripts/test.sh

chaos: build setup ## everything happens to a stack under load; every request's end is judged
	$(GO) build -race -o bin/baton-race ./cmd/baton
	$(BIN) chaos --binary bin/baton-race $(CHAOSFLAGS)
	$(BIN) chaos --engine llamacpp --transport tcp --requests 60 --faults 10 $(CHAOSFLAGS)

race: testdeps
	$(GO) test -race ./...

fuzz: ## each fuzz target for FUZZTIME (default 20s)
	@scripts/fuzz.sh

bench: setup
	$(GO) test -run '^$$' -bench . -benchmem ./internal/room ./internal/kv ./internal/transfer/...

generate:
	$(GO) generate ./...

clean:
	rm -rf bin dist .cache
