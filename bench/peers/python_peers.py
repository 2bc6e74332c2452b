#!/usr/bin/env python3
"""CuPy's memory pools and PyTorch's caching allocator as a Python program meets them.

The workloads, the requests and the rows are those of the C++ peers (serve.hpp, options.hpp). The interpreter is part of what is
measured, except in the random and replayed workloads, where a run that does nothing is subtracted. Threads share the interpreter
lock.
"""

import argparse
import ctypes
import math
import pathlib
import queue
import statistics
import sys
import threading
import time

MIB = 1 << 20
PER_BATCH = 1000
BATCHES = 101
# The number of timed runs of a whole workload: as many as the row's time allows, but three if they fit into four times that.
MOST_RUNS = 25
FEW_RUNS = 3
# The minimum number of runs with an allocator that does nothing; otherwise as many as were timed.
LEAST_IDLE_RUNS = 5
# The time limits of rows in seconds, independent of the peer and the row's time; docs/benchmarks.md defines them.
LIMITS = {"random": 1.0, "filling": 2.0, "replay": 1.0, "churn": 1.0}
CAP = 16_000 * MIB
# (allocations, largest in MiB): peak live blocks, peak bytes, and the hash of the steps if nothing fails.
CHECKS = {
    (1000, 1): (638, 323760572, 0x0A01169C41D5B10B),
    (1000, 64): (528, 16777102043, 0x42DD185240E2338E),
    (1000, 4096): (15, 16775344215, 0xF33F6E239DF3E016),
    (10000, 1): (6204, 3254545443, 0xB48179F771930716),
    (10000, 256): (167, 16777171549, 0xA0E15CEB7379D680),
    (100000, 1): (36071, 16777215997, 0xE20B4CEC1688E184),
    (100000, 4): (9714, 16777215986, 0x1C19B69F55857E88),
    (100000, 4096): (19, 16777201659, 0x0114DD316B70ED04),
}
# Hashing is slow in Python: longer runs are verified by their peaks.
HASHED = 10_000


class Skipped(Exception):
    """A row that cannot be measured; the text says why."""


def given_up(limit, done, all_of_them):
    """Why a row was given up, and how near it was to the end."""
    return Skipped(f"over {limit:g} s; {done} of {all_of_them} operations done")


def timed(run, seconds):
    """The times of as many runs as a row of so many seconds has."""
    times, start = [], time.perf_counter()
    while len(times) < MOST_RUNS:
        spent = time.perf_counter() - start
        if times and spent >= seconds and not (len(times) < FEW_RUNS and spent < 4 * seconds):
            break
        times.append(run())
    return times


class Device:
    """The driver of the GPU: the same kernel, events and counters as for the C++ peers (device.hpp)."""

    def __init__(self, ptx):
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Skipped("no libcuda.so.1") from error
        self.context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(self.context))
        if not self.context.value:
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
            self.call("cuCtxSetCurrent", self.context)
        self.function = None
        if ptx:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            image = pathlib.Path(ptx).read_bytes() + b"\0"
            self.call("cuModuleLoadData", ctypes.byref(module), image)
            self.call("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
            self.function = function
        self.local = threading.local()

    def call(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: error {status}")

    def memory(self):
        """Bytes that are taken, by anybody, and all there are."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value, total.value

    def order(self, first, then):
        event = getattr(self.local, "event", None)
        if event is None:
            self.call("cuCtxSetCurrent", self.context)
            event = ctypes.c_void_p()
            self.call("cuEventCreate", ctypes.byref(event), 2)
            self.local.event = event
        self.call("cuEventRecord", event, ctypes.c_void_p(first))
        self.call("cuStreamWaitEvent", ctypes.c_void_p(then), event, 0)

    def spin(self, stream, ticks, out):
        values = (ctypes.c_uint64(ticks), ctypes.c_uint64(out), ctypes.c_uint32(1))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        self.call("cuLaunchKernel", self.function, 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(stream), pointers, None)


class Nothing:
    """Does nothing: what the loop itself costs. Also lets the program be tried without a GPU."""

    variants = ("python",)

    def __init__(self, variant="python"):
        pass

    def stream(self):
        return None

    def raw(self, stream):
        return 0

    def address(self, block):
        return 0

    def enter_thread(self, stream):
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

    variants = ("python",)

    def __init__(self, variant):
        import torch

        torch.cuda.init()
        self.torch = torch
        self.streams = []
        self.free_block = torch.cuda.caching_allocator_delete

    def stream(self):
        stream = self.torch.cuda.Stream(0)
        self.streams.append(stream)
        return stream.cuda_stream

    def raw(self, stream):
        return stream

    def address(self, block):
        return block

    def enter_thread(self, stream):
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
    """`cupy.cuda.MemoryPool` and `MemoryAsyncPool`. A block is an object that gives its memory back when the last reference to it
    goes; a pool serves the stream that is current in the thread."""

    variants = ("pool", "async")

    def __init__(self, variant):
        import cupy

        self.cupy = cupy
        self.pool = cupy.cuda.MemoryPool() if variant == "pool" else cupy.cuda.MemoryAsyncPool()
        self.malloc = self.pool.malloc
        self.streams = []
        self.local = threading.local()

    def stream(self):
        stream = self.cupy.cuda.Stream(non_blocking=True)
        self.streams.append(stream)
        self.enter_thread(stream)
        return stream

    def raw(self, stream):
        return stream.ptr

    def address(self, block):
        return block.ptr

    def enter_thread(self, stream):
        self.cupy.cuda.Device(0).use()
        stream.use()
        self.local.current = stream

    def allocate(self, size, stream):
        if self.local.current is not stream:
            self.enter_thread(stream)
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

    def log_uniform(self, low, high):
        part = self.draw(0, 1 << 30) / (1 << 30)
        start = math.log(low)
        return min(max(int(math.exp(start + part * (math.log(high) - start))), low), high)


def xorshift(state):
    """Draws below a bound, one after the other."""

    def below(bound):
        nonlocal state
        state ^= state << 13 & 0xFFFF_FFFF_FFFF_FFFF
        state ^= state >> 7
        state ^= state << 17 & 0xFFFF_FFFF_FFFF_FFFF
        return state % bound

    return below


def random_operations(allocations, max_mib):
    """What the random workload does when nothing fails: a size for an allocation, the negated index less one for a free."""
    random = Minstd()
    operations, live, allocated, used = [], [], 0, 0
    peak_live = peak_bytes = 0
    fnv = 14695981039346656037
    check = CHECKS.get((allocations, max_mib))
    is_hashed = check is not None and allocations <= HASHED
    for _ in range(2 * allocations):
        size = random.draw(1, max_mib * MIB)
        choice = random.draw(0, 99) if live else 0
        if not live or (choice < 73 and allocated < allocations and used + size < CAP):
            operations.append(size)
            live.append(size)
            allocated += 1
            used += size
            peak_live, peak_bytes = max(peak_live, len(live)), max(peak_bytes, used)
            step = (1, size)
        else:
            at = random.draw(0, allocations - 1) % len(live)
            operations.append(-at - 1)
            used -= live[at]
            live[at] = live[-1]
            live.pop()
            step = (2, at)
        if is_hashed:
            for byte in step[0].to_bytes(8, "little") + step[1].to_bytes(8, "little"):
                fnv = (fnv ^ byte) * 1099511628211 & 0xFFFF_FFFF_FFFF_FFFF
    found = (peak_live, peak_bytes, fnv)
    if check is not None and found[: 3 if is_hashed else 2] != check[: 3 if is_hashed else 2]:
        sys.exit(f"random {allocations} of {max_mib} MiB: {found}, expected {check}")
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
            raise given_up(limit, min(first + 5000, len(operations)), len(operations))
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
    batch()
    while time.perf_counter() - start < seconds / 4:
        batch()
    times, start = [], time.perf_counter()
    while len(times) < BATCHES and (len(times) < 3 or time.perf_counter() - start < seconds):
        times.append(batch())
    peer.synchronize()
    return [("", None, statistics.median_high(times), "ns"), ("-best", None, min(times), "ns")]


def pair(row):
    peer = row.make()
    return measure_pairs(peer, peer.stream(), row.parameter, row.seconds)


def among(row, count, size, with_holes):
    peer = row.make()
    stream = peer.stream()
    holes = range(0, count if with_holes else 0, 2)
    limit, done = LIMITS["filling"], 0
    start = time.perf_counter()
    blocks = []
    try:
        for _ in range(count):
            blocks.append(peer.allocate(size, stream))
            done += 1
            if time.perf_counter() - start > limit:
                raise given_up(limit, done, count + len(holes))
        for at in holes:
            peer.free(blocks[at], stream)
            blocks[at] = None
            done += 1
            if time.perf_counter() - start > limit:
                raise given_up(limit, done, count + len(holes))
        peer.synchronize()
        return measure_pairs(peer, stream, 1024, row.seconds)
    finally:
        for block in blocks:
            if block is not None:
                peer.free(block, stream)


def random(row, allocations):
    if row.device and row.device.memory()[1] < 64 << 30:
        raise Skipped("needs a device of 64 GiB")
    operations = random_operations(allocations, row.parameter)
    peer = row.make()
    stream = peer.stream()
    start = time.perf_counter()
    random_run(peer, stream, operations, LIMITS["random"])
    peer.synchronize()
    while time.perf_counter() - start < row.seconds / 4:
        random_run(peer, stream, operations)
        peer.synchronize()

    def run():
        seconds = random_run(peer, stream, operations)
        peer.synchronize()
        return seconds

    times = timed(run, row.seconds)
    idle = min(random_run(Nothing(), None, operations) for _ in range(max(len(times), LEAST_IDLE_RUNS)))
    scale = 1e9 / len(operations)
    return [("", None, (min(times) - idle) * scale, "ns"), ("-idle", None, idle * scale, "ns")]


def threads(row, shares):
    steps, limit, count = 1_000_000, row.seconds / 2, row.parameter
    peer = row.make()
    barrier = threading.Barrier(count + 1)
    done, ends, errors = [0] * count, [0.0] * count, []

    def work(thread, stream):
        peer.enter_thread(stream)
        slots = [None] * 64
        below = xorshift(0x9E3779B9 + thread)

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

    shared = peer.stream()
    streams = [shared if shares else peer.stream() for _ in range(count)]
    workers = [threading.Thread(target=work, args=item) for item in enumerate(streams)]
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
    return [("", None, sum(done) / (max(ends) - start) / 1e6, "Mops/s")]


def handoff(row):
    most, max_bytes = 200_000, row.parameter * MIB
    device, peer = row.need_device(), row.make()
    source, target = peer.stream(), peer.stream()
    ring, errors = queue.Queue(64), []

    def consume():
        peer.enter_thread(target)
        while (block := ring.get()) is not None:
            try:
                device.order(peer.raw(source), peer.raw(target))
                # A block returns to the stream of its allocation, which first waits for the other one.
                device.order(peer.raw(target), peer.raw(source))
                peer.free(block, source)
            except Exception as error:  # the ring must be emptied
                errors.append(error)
            block = None

    consumer = threading.Thread(target=consume)
    consumer.start()
    below = xorshift(7)
    moved = seconds = 0
    try:
        for count in (most // 10, most):
            start, moved = time.perf_counter(), 0
            while moved < count and not errors:
                if moved % 256 == 255 and time.perf_counter() - start > row.seconds:
                    break
                ring.put(peer.allocate(1 + below(max_bytes), source))
                moved += 1
            seconds = time.perf_counter() - start
    finally:
        ring.put(None)
        consumer.join()
    if errors:
        raise errors[0]
    return [("", None, moved / seconds / 1e6, "Mops/s")]


def kernels(row, is_warm):
    device = row.need_device()
    if device.function is None:
        raise Skipped("no kernel was given")
    times, start = [], time.perf_counter()
    while len(times) < 16 and (len(times) < 4 or time.perf_counter() - start < 5 * row.seconds):
        peer = row.make()
        streams = [peer.stream() for _ in range(row.parameter)]
        for stream in streams if is_warm else []:
            peer.free(peer.allocate(8, stream), stream)
        peer.synchronize()
        began = time.perf_counter()
        for kernel in range(4):
            stream = streams[kernel % len(streams)]
            block = peer.allocate(8, stream)
            device.spin(peer.raw(stream), 1_000_000, peer.address(block))
            peer.free(block, stream)
            block = None
        peer.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
        row.close()
    return [("", None, statistics.median_high(times[1:]), "us")]


def replay_run(peer, streams, plan, slots, limit=None):
    allocate, free = peer.allocate, peer.free
    live = [None] * slots
    start = time.perf_counter()
    for first in range(0, len(plan), 5000):
        for stream, slot, size in plan[first : first + 5000]:
            if size:
                live[slot] = (allocate(size, streams[stream]), streams[stream])
            else:
                free(*live[slot])
                live[slot] = None
        if limit is not None and time.perf_counter() - start > limit:
            for block in live:
                if block is not None:
                    free(*block)
            raise given_up(limit, min(first + 5000, len(plan)), len(plan))
    return time.perf_counter() - start


def replay(row, kind):
    if not row.plans:
        raise Skipped("no plans were given")
    with open(pathlib.Path(row.plans) / f"{kind}.plan", encoding="ascii") as file:
        plan = [tuple(map(int, line.split())) for line in file]
    slots, live, now, peak = 1 + max(step[1] for step in plan), {}, 0, 0
    for _, slot, size in plan:
        now += size if size else -live.pop(slot)
        if size:
            live[slot] = size
        peak = max(peak, now)
    before = row.device.memory()[0] if row.device else 0
    peer = row.make()
    streams = [peer.stream() for _ in range(1 + max(step[0] for step in plan))]

    def run(limit=None):
        seconds = replay_run(peer, streams, plan, slots, limit)
        peer.synchronize()
        return seconds

    start = time.perf_counter()
    run(LIMITS["replay"])
    held = row.device.memory()[0] - before if row.device else 0
    while time.perf_counter() - start < row.seconds / 4:
        run()
    times = timed(run, row.seconds)
    idle = min(replay_run(Nothing(), streams, plan, slots) for _ in range(max(len(times), LEAST_IDLE_RUNS)))
    rows = [("", None, (min(times) - idle) * 1e9 / len(plan), "ns")]
    return rows + ([("-held", None, held / peak, "ratio")] if held else [])


def churn(row):
    device = row.need_device()
    per_phase, limit, done = row.parameter // 10, LIMITS["churn"], 0
    before = device.memory()[0]
    peer = row.make()
    stream = peer.stream()
    random, live, used, peak = Minstd(), [], 0, 0
    seen, worst, spent = [], 0.0, 0.0
    for phase, largest in enumerate((4, 1024, 64, 16384, 256, 4096, 65536, 16, 1024, 65536)):
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(per_phase // 10):
                size = random.log_uniform(256, largest << 10)
                if not live or (random.draw(0, 99) < 60 and used + size <= 4 << 30):
                    live.append((size, peer.allocate(size, stream)))
                    used += size
                    peak = max(peak, used)
                else:
                    at = random.draw(0, len(live) - 1)
                    size, block = live[at]
                    live[at] = live[-1]
                    live.pop()
                    used -= size
                    peer.free(block, stream)
                    block = None
            spent += time.perf_counter() - start
            done += per_phase // 10
            if spent > limit:
                for _, block in live:
                    peer.free(block, stream)
                raise given_up(limit, done, 10 * per_phase)
            if phase > 0:
                worst = max(worst, (device.memory()[0] - before) / peak)
        seen.append((device.memory()[0] - before) / peak)
    for _, block in live:
        peer.free(block, stream)
    rows = [("", None, worst, "ratio"), ("-time", None, spent * 1e9 / (10 * per_phase), "ns")]
    return rows + [("-at", 10 * (at + 1), ratio, "ratio") for at, ratio in enumerate(seen)]


WORKLOADS = {
    "pair": pair,
    "holes": lambda row: among(row, 2 * row.parameter, 4096, True),
    "live": lambda row: among(row, row.parameter, 1024, False),
    "threads": lambda row: threads(row, False),
    "threads-shared": lambda row: threads(row, True),
    "random": lambda row: random(row, 100_000),
    "random-10000": lambda row: random(row, 10_000),
    "random-1000": lambda row: random(row, 1_000),
    "handoff": handoff,
    "kernels-cold": lambda row: kernels(row, False),
    "kernels-warm": lambda row: kernels(row, True),
    "replay-dataframe": lambda row: replay(row, "dataframe"),
    "replay-llm": lambda row: replay(row, "llm"),
    "replay-datalog": lambda row: replay(row, "datalog"),
    "churn": churn,
}
PEERS = {"cupy": CuPy, "torch": Torch, "nothing": Nothing}


class Row:
    """One request, and the allocators that were made for it."""

    def __init__(self, options, device, kind, variant, parameter):
        self.seconds, self.plans, self.device, self.parameter = options.seconds, options.plans, device, parameter
        self.kind, self.variant, self.peers = kind, variant, []

    def make(self):
        self.peers.append(self.kind(self.variant))
        return self.peers[-1]

    def need_device(self):
        if self.device is None:
            raise Skipped("there is no GPU")
        return self.device

    def close(self):
        while self.peers:
            self.peers.pop().close()


def answer(text, options, device):
    kind = PEERS[options.peer]
    variant, workload, parameter = "-", "-", 0
    row = None
    try:
        parts = text.split(":")
        if len(parts) != 3 or not parts[2].isdecimal() or int(parts[2]) == 0:
            raise Skipped(f"'{text}' is not VARIANT:WORKLOAD:PARAMETER")
        variant, workload, parameter = parts[0], parts[1], int(parts[2])
        if variant not in kind.variants:
            raise Skipped(f"there is no variant '{variant}'")
        if workload not in WORKLOADS:
            raise Skipped(f"unknown workload '{workload}'")
        print(f"{options.peer} {text}", file=sys.stderr)
        row = Row(options, device, kind, variant, parameter)
        rows = WORKLOADS[workload](row)
    except Exception as error:
        reason = str(error) if isinstance(error, Skipped) else f"{type(error).__name__}: {error}"
        reason = "".join(" " if letter in ',\n\r"' else letter for letter in reason)[:160]
        print(f"{options.peer},{variant},{workload},{parameter},,skipped: {reason}", flush=True)
    else:
        for suffix, at, value, unit in rows:
            print(f"{options.peer},{variant},{workload}{suffix},{at or parameter},{value:.4f},{unit}", flush=True)
    finally:
        if row is not None:
            row.close()


def positive(text):
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"bad number of seconds '{text}'; accepted is a number above 0")
    return value


def main():
    parser = argparse.ArgumentParser(description="Measures CuPy's pools or PyTorch's allocator from Python.")
    parser.add_argument("--peer", required=True, choices=PEERS, help="'nothing' needs no GPU and measures the loops alone")
    parser.add_argument("--seconds", type=positive, default=1.0, help="time limit for a row (1)")
    parser.add_argument("--ptx", help="the kernels")
    parser.add_argument("--plans", help="the folder of the plans to replay")
    parser.add_argument("--serve", action="store_true", help="take rows from standard input")
    parser.add_argument("rows", nargs="*", metavar="VARIANT:WORKLOAD:PARAMETER")
    options = parser.parse_args()
    device = None
    if options.peer != "nothing":
        # The first allocator creates the context that the kernels are loaded into.
        PEERS[options.peer](PEERS[options.peer].variants[0]).close()
        device = Device(options.ptx)
    for text in options.rows:
        answer(text, options, device)
    for line in sys.stdin if options.serve else ():
        answer(line.strip(), options, device)
        print(".", flush=True)


if __name__ == "__main__":
    main()
