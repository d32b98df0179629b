# What the peers' benchmarks share: the work, the check of every byte, and the rows.
# The work is that of kvbench: scattered blocks, medians of rounds, one-way latency on the
# machine's monotonic clock. Run by `baton bench transfer --peers`.
import argparse
import json
import mmap
import multiprocessing
import resource
import time

import numpy as np

MAX_WRITE_BYTES = 8 << 20


def options():
    p = argparse.ArgumentParser()
    p.add_argument("--blocks", required=True, help="comma separated bytes")
    p.add_argument("--size", type=int, required=True)
    p.add_argument("--rounds", type=int, required=True)
    p.add_argument("--latencies", type=int, required=True)
    o = p.parse_args()
    o.blocks = [int(b) for b in o.blocks.split(",")]
    return o


def memory(size):
    """Anonymous shared memory, every page touched, and its address."""
    m = mmap.mmap(-1, size)
    a = np.frombuffer(m, dtype=np.uint8)
    a[:] = 255
    return a, a.ctypes.data


def pattern(size, seed):
    """The round's bytes: a 64-bit counter, so that each block of each round differs."""
    return (np.arange(size // 8, dtype=np.uint64) * np.uint64(6364136223846793005) + np.uint64(seed)).view(np.uint8)


def places(n):
    return np.random.default_rng(n).permutation(n).astype(np.int32)


def cpu():
    u = resource.getrusage(resource.RUSAGE_SELF)
    return u.ru_utime + u.ru_stime


def intact(dst, block, seed):
    """Whether every block of the pattern stands at its place."""
    n = len(dst) // block
    want = pattern(n * block, seed).reshape(n, block)
    return bool((dst[: n * block].reshape(n, block)[places(n)] == want).all())


def run(name, o, source, ask):
    """Measures every block size. source.write(block, src, dst) moves blocks by index and returns
    when they are applied; source.single(block, src, dst) sends one with a notification and returns its
    one-way time in seconds; ask(question) is answered by the target process."""
    for block in o.blocks:
        n = o.size // block
        to = places(n)
        each = max(1, min(source.max_entries, MAX_WRITE_BYTES // block))
        rates, used, moved, good = [], 0.0, 0.0, True
        for r in range(o.rounds + 1):
            seed = (r + 1) * 1_000_003 + block
            source.mem[: n * block] = pattern(n * block, seed)
            other, own, began = ask(("cpu",)), cpu(), time.monotonic()
            source.write(block, n, to, each)
            took = time.monotonic() - began
            own = cpu() - own + ask(("cpu",)) - other
            good = ask(("verify", block, seed)) and good
            if r:
                rates.append(n * block / 1e9 / took)
                used += own
                moved += n * block / 1e9
        rates.sort()
        lat = sorted(source.single(block, i % n, int(to[i % n])) for i in range(o.latencies))
        at = lambda q: lat[min(int(q * len(lat)), len(lat) - 1)] * 1e6 if lat else 0
        print(json.dumps(dict(transport=name, block_bytes=block, gb_per_s=rates[len(rates) // 2], p50_us=at(0.5), verified=good,
                              gb_per_s_min=rates[0], gb_per_s_max=rates[-1], p99_us=at(0.99), cpu_s_per_gb=used / moved,
                              rooms=1, rounds=o.rounds)), flush=True)


def pair(target, *args):
    """Starts target(connection, *args) in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    p = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *args), daemon=True)
    p.start()
    theirs.close()
    return p, ours
