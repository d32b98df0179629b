# NIXL's own Python API on kvbench's work. UCX_TLS in the environment chooses UCX's transports,
# NIXL_POLL spin or sleep how completions are waited for.
import os
import struct
import sys
import time

import numpy as np

sys.path.insert(0, os.path.dirname(__file__))
import common

SPIN = os.environ.get("NIXL_POLL", "spin") == "spin"


def agent(name):
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def relax():
    if not SPIN:
        time.sleep(20e-6)


def target(pipe, size):
    a = agent("target")
    mem, addr = common.memory(size)
    pattern = common.Pattern(size)
    a.register_memory([(addr, size, 0, "")], "DRAM")
    pipe.send((a.get_agent_metadata(), addr))
    times, turns = [], 0
    while True:
        turns += 1
        for notes in a.get_new_notifs().values():
            for n in notes:
                if len(n) == 8:
                    times.append(time.monotonic() - struct.unpack("d", n)[0])
        if turns % (64 if SPIN else 1) or not pipe.poll():  # a system call: not at every turn of a spin
            relax()
            continue
        q = pipe.recv()
        if q[0] == "time":
            end = time.monotonic() + 10
            while not times and time.monotonic() < end:
                for notes in a.get_new_notifs().values():
                    for n in notes:
                        if len(n) == 8:
                            times.append(time.monotonic() - struct.unpack("d", n)[0])
            pipe.send(times.pop(0))
        else:
            common.answer(q, pipe, mem, pattern)


class Source:
    max_entries = 2048

    def __init__(self, pipe, size):
        self.pipe = pipe
        self.agent = agent("source")
        self.mem, self.addr = common.memory(size)
        self.size = size
        self.agent.register_memory([(self.addr, size, 0, "")], "DRAM")
        md, self.there = pipe.recv()
        self.name = self.agent.add_remote_agent(md)
        self.block = 0

    def prepare(self, block):
        if block == self.block:
            return
        n = self.size // block
        table = lambda base: np.stack([base + np.arange(n, dtype=np.uint64) * np.uint64(block), np.full(n, block, np.uint64), np.zeros(n, np.uint64)], axis=1)
        self.ours = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", table(self.addr), "DRAM")
        self.theirs = self.agent.prep_xfer_dlist(self.name, table(self.there), "DRAM")
        self.block = block

    def move(self, src, dst, note=b""):
        h = self.agent.make_prepped_xfer("WRITE", self.ours, src, self.theirs, dst, note)
        state = self.agent.transfer(h)
        while state == "PROC":
            relax()
            state = self.agent.check_xfer_state(h)
        self.agent.release_xfer_handle(h)
        if state != "DONE":
            raise RuntimeError("transfer ended " + state)

    def write(self, block, n, to, each):
        self.prepare(block)
        idx = np.arange(n, dtype=np.int32)
        for i in range(0, n, each):
            self.move(idx[i : i + each], to[i : i + each], b"x")

    def single(self, block, src, dst):
        self.prepare(block)
        self.move(np.array([src], np.int32), np.array([dst], np.int32), struct.pack("d", time.monotonic()))
        self.pipe.send(("time",))
        return self.pipe.recv()


if __name__ == "__main__":
    common.serve("nixl " + os.environ.get("UCX_TLS", "default") + (" spin" if SPIN else " sleep"), target, Source, int(sys.argv[1]))
