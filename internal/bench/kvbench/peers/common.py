# What the peers' benchmarks share: the work, the check of every byte, and the talk with
# `baton bench transfer --peers`, which runs them. The work is that of kvbench: scattered blocks, one-way
# latency on the machine's monotonic clock.
import json
import mmap
import multiprocessing
import os
import resource
import sys
import time

import numpy as np

MAX_WRITE_BYTES = 8 << 20


def memory(size):
    """Anonymous shared memory, every page touched, and its address."""
    m = mmap.mmap(-1, size)
    a = np.frombuffer(m, dtype=np.uint8)
    a[:] = 255
    return a, a.ctypes.data


class Pattern:
    """A round's bytes: a 64-bit counter from seed on, so that each block of each round differs."""

    def __init__(self, size):
        self.steps = np.arange(size // 8, dtype=np.uint64) * np.uint64(6364136223846793005)

    def of(self, size, seed):
        return (self.steps + np.uint64(seed)).view(np.uint8)[:size]

    def stands(self, mem, block, seed):
        """Whether each block of the round is at its place."""
        n = len(mem) // block
        got = mem[: n * block].reshape(n, block)[places(n)]
        return bool(np.array_equal(got, self.of(n * block, seed).reshape(n, block)))


def places(n):
    return np.random.default_rng(n).permutation(n).astype(np.int32)


def cpu():
    u = resource.getrusage(resource.RUSAGE_SELF)
    return u.ru_utime + u.ru_stime


def answer(q, pipe, mem, pattern):
    """The target's answer to ask's questions. After ("rest",) the process waits for the next one without CPU."""
    if q[0] == "cpu":
        pipe.send(cpu())
    elif q[0] == "verify":
        pipe.send(pattern.stands(mem, q[1], q[2]))
    elif q[0] == "rest":
        pipe.send(None)
        pipe.poll(None)
    else:
        os._exit(0)  # a library's own threads may not end


def serve(name, target, make, size):
    """Starts target(pipe, size) in a process of its own and does what the lines of stdin say.

    make(pipe, size) is the source: its write(block, n, to, each) moves blocks by index and returns when they are applied;
    single(block, src, dst) sends one with a notification and returns its one-way time in seconds."""
    pipe, theirs = multiprocessing.Pipe()
    p = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, size), daemon=True)
    p.start()
    theirs.close()
    source = make(pipe, size)
    pattern = Pattern(size)

    def ask(*q):
        pipe.send(q)
        return pipe.recv()

    def round(block, seed):
        n = size // block
        to = places(n)
        source.mem[: n * block] = pattern.of(n * block, seed)
        each = max(1, min(source.max_entries, MAX_WRITE_BYTES // block))
        other, own, began = ask("cpu"), cpu(), time.monotonic()
        source.write(block, n, to, each)
        took = time.monotonic() - began
        own = cpu() - own + ask("cpu") - other
        return dict(rooms=1, bytes=n * block, seconds=took, cpu=own, verified=ask("verify", block, seed))

    def singles(block, count):
        n = size // block
        to = places(n)
        ask("cpu")  # ends the target's rest: a library may need it to get anything done
        return dict(ns=[int(source.single(block, i % n, int(to[i % n])) * 1e9) for i in range(count)])

    ask("rest")
    print(json.dumps(dict(name=name)), flush=True)
    for line in sys.stdin:
        q = json.loads(line)
        a = round(q["block"], q["seed"]) if q["op"] == "round" else singles(q["block"], q.get("n", 0))
        ask("rest")
        print(json.dumps(a), flush=True)
    pipe.send(("end",))
    p.join(10)
    os._exit(0)
