#!/usr/bin/env python3
"""CuPy's memory pool and PyTorch's caching allocator as a Python program meets them.

The workloads, the options and the rows are those of the C++ peers (workloads.hpp, options.hpp). The interpreter is part of what is
measured, except in the random workload, where a run that does nothing is subtracted. Threads share the interpreter lock.
"""

import argparse
import statistics
import sys
import threading
import time

MIB = 1 << 20
PER_BATCH = 1000
BATCHES = 101
CAP = 16_000 * MIB
FNV_OF = {  # (allocations, largest in MiB): the hash of what is done when nothing fails
    (1000, 1): 0x0A01169C41D5B10B,
    (1000, 64): 0x42DD185240E2338E,
    (1000, 4096): 0xF33F6E239DF3E016,
    (10000, 1): 0xB48179F771930716,
    (10000, 256): 0xA0E15CEB7379D680,
    (100000, 1): 0xE20B4CEC1688E184,
    (100000, 4): 0x1C19B69F55857E88,
    (100000, 4096): 0x0114DD316B70ED04,
}


class Skipped(Exception):
    """A row that cannot be measured; the text says why."""


class Nothing:
    """Does nothing: what the loop itself costs. Also lets the program be tried without a GPU."""

    def __init__(self):
        self.total_bytes = 1 << 40

    def stream(self):
        return None

    def enter_thread(self):
        pass

    def allocate(self, size, stream):
        return 1

    def free(self, block, stream):
        pass

    def synchronize(self):
        pass

    def close(self):
        pass


class Torch:
    """`torch.cuda.caching_allocator_alloc` and `_delete`; one allocator for the process, emptied after every row."""

    def __init__(self):
        import torch

        torch.cuda.init()
        self.torch = torch
        self.total_bytes = torch.cuda.get_device_properties(0).total_memory
        self.streams = []
        self.free_block = torch.cuda.caching_allocator_delete

    def stream(self):
        stream = self.torch.cuda.Stream(0)
        self.streams.append(stream)
        return stream.cuda_stream

    def enter_thread(self):
        self.torch.cuda.set_device(0)

    def allocate(self, size, stream):
        return self.torch.cuda.caching_allocator_alloc(size, 0, stream)

    def free(self, block, stream):
        self.free_block(block)

    def synchronize(self):
        self.torch.cuda.synchronize()

    def close(self):
        self.synchronize()
        self.torch.cuda.empty_cache()


class CuPy:
    """A `cupy.cuda.MemoryPool`. A block is an object that gives its memory back when the last reference to it goes."""

    def __init__(self):
        import cupy

        self.cupy = cupy
        self.pool = cupy.cuda.MemoryPool()
        self.total_bytes = cupy.cuda.runtime.memGetInfo()[1]
        self.malloc = self.pool.malloc
        self.streams = []

    def stream(self):
        # The pool serves the stream that is current in the thread; a row with one stream makes it current here.
        stream = self.cupy.cuda.Stream(non_blocking=True)
        stream.use()
        self.streams.append(stream)
        return stream

    def enter_thread(self):
        self.cupy.cuda.Device(0).use()
        self.stream()

    def allocate(self, size, stream):
        return self.malloc(size)

    def free(self, block, stream):
        pass

    def synchronize(self):
        self.cupy.cuda.runtime.deviceSynchronize()

    def close(self):
        self.synchronize()
        self.pool.free_all_blocks()
        self.cupy.cuda.Stream.null.use()


class Minstd:
    """The minimal standard generator, seed 1, with the bounded draw of libstdc++."""

    RANGE = 2147483645

    def __init__(self):
        self.state = 1

    def next(self):
        self.state = self.state * 16807 % 2147483647
        return self.state

    def draw(self, low, high):
        span = high - low
        if self.RANGE > span:
            scale = self.RANGE // (span + 1)
            while True:
                value = self.next() - 1
                if value < (span + 1) * scale:
                    return low + value // scale
        if self.RANGE < span:
            while True:
                upper = (self.RANGE + 1) * self.draw(0, span // (self.RANGE + 1))
                value = upper + self.next() - 1
                if upper <= value <= span:
                    return low + value
        return low + self.next() - 1


def random_operations(allocations, max_mib):
    """What the random workload does when nothing fails: a size for an allocation, the negated index less one for a free."""
    random = Minstd()
    operations, live, allocated, used = [], [], 0, 0
    fnv = 14695981039346656037

    def add(fnv, word):
        for byte in word.to_bytes(8, "little"):
            fnv = (fnv ^ byte) * 1099511628211 & 0xFFFF_FFFF_FFFF_FFFF
        return fnv

    check = FNV_OF.get((allocations, max_mib))
    for _ in range(2 * allocations):
        size = random.draw(1, max_mib * MIB)
        choice = random.draw(0, 99) if live else 0
        if not live or (choice < 73 and allocated < allocations and used + size < CAP):
            operations.append(size)
            live.append(size)
            allocated += 1
            used += size
            step = (1, size)
        else:
            at = random.draw(0, allocations - 1) % len(live)
            operations.append(-at - 1)
            used -= live[at]
            live[at] = live[-1]
            live.pop()
            step = (2, at)
        if check is not None:
            fnv = add(add(fnv, step[0]), step[1])
    if check is not None and fnv != check:
        sys.exit(f"random {allocations} of {max_mib} MiB: hash {fnv:016x}, expected {check:016x}")
    return operations


def random_run(peer, stream, operations, limit=None):
    """The seconds of one run; with a limit, a run that takes longer ends with `Skipped`."""
    allocate, free, live = peer.allocate, peer.free, []
    start = time.perf_counter()
    for first in range(0, len(operations), 5000):
        for operation in operations[first : first + 5000]:
            if operation > 0:
                live.append(allocate(operation, stream))
            else:
                at = -operation - 1
                block = live[at]
                live[at] = live[-1]
                live.pop()
                free(block, stream)
                block = None
        if limit is not None and time.perf_counter() - start > limit:
            for block in live:
                free(block, stream)
            raise Skipped(f"over {limit} s; {first + 5000} of {len(operations)} operations done")
    seconds = time.perf_counter() - start
    for block in live:
        free(block, stream)
    return seconds


def measure_pairs(peer, stream, size, seconds):
    """The median and the best of batches, in nanoseconds for a pair."""
    allocate, free = peer.allocate, peer.free

    def batch():
        start = time.perf_counter()
        for _ in range(PER_BATCH):
            block = allocate(size, stream)
            free(block, stream)
            block = None
        return (time.perf_counter() - start) * 1e9 / PER_BATCH

    start = time.perf_counter()
    for turn in range(10):
        if turn > 0 and time.perf_counter() - start > seconds / 4:
            break
        batch()
    times, start = [], time.perf_counter()
    while len(times) < BATCHES and (len(times) < 3 or time.perf_counter() - start < seconds):
        times.append(batch())
    peer.synchronize()
    return statistics.median_high(times), min(times)


def pair(peer, size, options):
    median, best = measure_pairs(peer, peer.stream(), size, options.seconds)
    return [("pair", median, "ns"), ("pair-best", best, "ns")]


def holes(peer, count, options):
    stream = peer.stream()
    limit = 5 * options.seconds
    start = time.perf_counter()
    blocks = []
    for _ in range(2 * count):
        blocks.append(peer.allocate(4096, stream))
        if time.perf_counter() - start > limit:
            break
    complete = len(blocks) == 2 * count
    if complete:
        for at in range(0, len(blocks), 2):
            peer.free(blocks[at], stream)
            blocks[at] = None
        peer.synchronize()
        median, best = measure_pairs(peer, stream, 1024, options.seconds)
    for block in blocks:
        if block is not None:
            peer.free(block, stream)
    if not complete:
        raise Skipped(f"filling took over {limit} s")
    return [("holes", median, "ns"), ("holes-best", best, "ns")]


def random(peer, max_mib, options):
    if peer.total_bytes < 64 << 30:
        raise Skipped("needs a device of 64 GiB")
    operations = random_operations(options.allocations, max_mib)
    stream = peer.stream()
    random_run(peer, stream, operations, options.seconds)
    peer.synchronize()
    times, start = [], time.perf_counter()
    while len(times) < 5 and (not times or time.perf_counter() - start < options.seconds):
        times.append(random_run(peer, stream, operations))
        peer.synchronize()
    nothing = Nothing()
    idle = min(random_run(nothing, None, operations) for _ in range(3))
    return [(random_name(options), (min(times) - idle) * 1e9 / len(operations), "ns")]


def random_name(options):
    return "random" if options.allocations == 100_000 else f"random-{options.allocations}"


def threads(peer, count, options):
    steps, limit = 1_000_000, options.seconds / 2
    barrier = threading.Barrier(count + 1)
    done, ends, errors = [0] * count, [0.0] * count, []

    def work(thread, stream):
        peer.enter_thread()
        slots = [None] * 64
        state = 0x9E3779B9 + thread

        def below(bound):
            nonlocal state
            state ^= state << 13 & 0xFFFF_FFFF_FFFF_FFFF
            state ^= state >> 7
            state ^= state << 17 & 0xFFFF_FFFF_FFFF_FFFF
            return state % bound

        def toggle(most, seconds):
            start = time.perf_counter()
            for step in range(most):
                if step % 256 == 255 and time.perf_counter() - start > seconds:
                    return step
                at = below(64)
                block = slots[at]
                if block is not None:
                    slots[at] = None
                    peer.free(block, stream)
                else:
                    slots[at] = peer.allocate(1 + below(MIB), stream)
                block = None
            return most

        try:
            toggle(steps // 10, limit / 2)
            barrier.wait()
            done[thread] = toggle(steps, limit)
            ends[thread] = time.perf_counter()
        except Exception as error:  # a thread that dies must not leave the others at the barrier
            errors.append(error)
            barrier.abort()
        for block in slots:
            if block is not None:
                peer.free(block, stream)

    workers = [threading.Thread(target=work, args=(thread, peer.stream())) for thread in range(count)]
    for worker in workers:
        worker.start()
    try:
        barrier.wait()
    except threading.BrokenBarrierError:
        pass
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    peer.synchronize()
    if errors:
        raise errors[0]
    return [("threads", sum(done) / (max(ends) - start) / 1e6, "Mops/s")]


WORKLOADS = {
    "pair": (pair, [256, 1 << 10, 64 << 10, MIB, 64 * MIB]),
    "holes": (holes, [4 << 10, 16 << 10, 64 << 10]),
    "random": (random, [1, 4, 64, 256, 1024, 4096]),
    "threads": (threads, [1, 2, 4, 8, 16]),
}
PEERS = {"cupy": ("pool", CuPy), "torch": ("python", Torch), "nothing": ("python", Nothing)}


def run(peer_name, options):
    variant, make = PEERS[peer_name]
    for kind, (workload, parameters) in WORKLOADS.items():
        if options.only not in (None, kind):
            continue
        name = random_name(options) if kind == "random" else kind
        for parameter in parameters:
            if f"{variant}:{name}:{parameter}" in options.skip:
                continue
            print(f"{peer_name} {variant}: {name} {parameter}", file=sys.stderr)
            try:
                peer = make()
                try:
                    rows = workload(peer, parameter, options)
                finally:
                    peer.close()
            except Exception as error:
                reason = str(error) if isinstance(error, Skipped) else f"{type(error).__name__}: {error}"
                reason = "".join(" " if letter in ',\n\r"' else letter for letter in reason)[:160]
                print(f"{peer_name},{variant},{name},{parameter},,skipped: {reason}", flush=True)
                continue
            for row, value, unit in rows:
                print(f"{peer_name},{variant},{row},{parameter},{value:.3f},{unit}", flush=True)


def positive(text):
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"bad number of seconds '{text}'; accepted is a number above 0")
    return value


def main():
    parser = argparse.ArgumentParser(description="Measures CuPy's pool or PyTorch's allocator from Python.")
    parser.add_argument("--peer", required=True, choices=PEERS, help="'nothing' needs no GPU and measures the loops alone")
    parser.add_argument("--only", choices=WORKLOADS)
    parser.add_argument("--seconds", type=positive, default=1.0, help="time limit for a row (1)")
    parser.add_argument("--allocations", type=int, default=100_000, help="allocations in one random run (100000)")
    parser.add_argument("--skip", action="append", default=[], metavar="VARIANT:WORKLOAD:PARAMETER")
    options = parser.parse_args()
    run(options.peer, options)


if __name__ == "__main__":
    main()
