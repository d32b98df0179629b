# Mooncake's transfer engine (tcp) on kvbench's work.
import os
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
import common


def engine():
    from mooncake.engine import TransferEngine

    e = TransferEngine()
    if e.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("mooncake: initialize failed")
    return e


def target(pipe, size):
    e = engine()
    mem, addr = common.memory(size)
    if e.register_memory(addr, size) != 0:
        raise RuntimeError("mooncake: register_memory failed")
    pipe.send(("127.0.0.1:%d" % e.get_rpc_port(), addr))
    pattern = common.Pattern(size)
    while True:
        common.answer(pipe.recv(), pipe, mem, pattern)


class Source:
    max_entries = 1024  # more than 2,048 entries a batch break the engine

    def __init__(self, pipe, size):
        self.engine = engine()
        self.mem, self.addr = common.memory(size)
        if self.engine.register_memory(self.addr, size) != 0:
            raise RuntimeError("mooncake: register_memory failed")
        self.name, self.there = pipe.recv()

    def write(self, block, n, to, each):
        for i in range(0, n, each):
            k = min(each, n - i)
            rc = self.engine.batch_transfer_sync_write(
                self.name, [self.addr + (i + j) * block for j in range(k)], [self.there + int(t) * block for t in to[i : i + k]], [block] * k)
            if rc != 0:
                raise RuntimeError("mooncake: write ended %d" % rc)

    def single(self, block, src, dst):
        # It has no notification: the time of the synchronous write is what a caller waits for.
        began = time.monotonic()
        if self.engine.transfer_sync_write(self.name, self.addr + src * block, self.there + dst * block, block) != 0:
            raise RuntimeError("mooncake: write failed")
        return time.monotonic() - began


if __name__ == "__main__":
    common.serve("mooncake tcp", target, Source, int(sys.argv[1]))
