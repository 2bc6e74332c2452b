"""The C functions that PyTorch calls, without PyTorch, on the simulated device: its race detector shows the order.

Before PyTorch is known, a refusal is a null pointer here; the exception needs PyTorch's classes.
"""

import ctypes
import threading
import unittest

from shared_sim import LIMIT, runtime

import xlogmem
from xlogmem import _captures, _native

LIBRARY = ctypes.CDLL(_native.__file__)
VOID, SIZE, INT, ID = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_uint64


def function(name, result, *arguments):
    found = getattr(LIBRARY, name)
    found.restype, found.argtypes = result, arguments
    return found


allocate = function("xlogmem_torch_alloc", VOID, SIZE, INT, VOID)
free = function("xlogmem_torch_free", None, VOID, SIZE, INT, VOID)
record_stream = function("xlogmem_torch_record_stream", None, VOID, VOID)
reset = function("xlogmem_torch_reset", None)
memory_fraction = function("xlogmem_torch_memory_fraction", None, ctypes.c_double, INT)
base_alloc = function("xlogmem_torch_base_alloc", VOID, VOID, ctypes.POINTER(ctypes.c_size_t))
begin_pool = function("xlogmem_torch_begin_pool", None, INT, ID, ID, VOID)
end_pool = function("xlogmem_torch_end_pool", None, INT, ID, ID)
release_pool = function("xlogmem_torch_release_pool", None, INT, ID, ID)


# PyTorch's streams are never destroyed, so those of these tests are not either.
STREAMS = [runtime.stream() for _ in range(3)]


def statistics():
    return _native.torch_statistics(_native.TORCH_GLOBAL, 0)


def live_bytes():
    counts = statistics()
    return counts["allocated_bytes"]["current"] if counts else 0


class OnStreams(unittest.TestCase):
    def setUp(self):
        self.one, self.other, self.third = STREAMS
        self.live = live_bytes()

    def take(self, size, stream=None):
        address = allocate(size, 0, (stream or self.one).handle)
        self.assertIsNotNone(address)
        return address

    def give(self, address, stream=None):
        free(address, 0, 0, (stream or self.one).handle)


class Allocator(OnStreams):
    def tearDown(self):
        runtime.synchronize()
        self.assertEqual(runtime.races(), [])
        self.assertEqual(live_bytes(), self.live)

    def test_addresses_are_multiples_of_512_and_serve_again_on_their_stream(self):
        addresses = [self.take(size) for size in [1, 511, 513, 5000, 70_000, 1 << 20]]
        self.assertEqual([address % 512 for address in addresses], [0] * 6)
        for address in addresses:
            self.give(address)
        held = runtime.physical_bytes
        for _ in range(50):
            self.give(self.take(1 << 20))
        self.assertEqual(runtime.physical_bytes, held)

    def test_no_bytes_are_no_memory_and_unknown_addresses_are_ignored(self):
        self.assertIsNone(allocate(0, 0, self.one.handle))
        self.assertIsNone(allocate(-5, 0, self.one.handle))
        free(None, 0, 0, None)
        free(12345, 0, 0, None)
        record_stream(12345, self.one.handle)

    def test_beyond_the_limit_nothing_is_handed_out_and_less_still_fits(self):
        refused = statistics()["num_ooms"] if statistics() else 0
        self.assertIsNone(allocate(LIMIT + 1, 0, self.one.handle))
        self.assertEqual(statistics()["num_ooms"], refused + 1)
        self.assertIsNone(allocate(1 << 62, 0, self.one.handle))
        self.assertIsNone(allocate(4096, 99, self.one.handle))
        self.give(self.take(LIMIT // 2))

    def test_a_tag_names_the_memory(self):
        with xlogmem.tag("optimizer"):
            address = self.take(1 << 20)
        self.assertEqual(runtime.statistics()["by_tag"]["optimizer"]["current_bytes"], 1 << 20)
        self.give(address)

    def test_a_recorded_stream_is_waited_for_before_the_memory_serves_again(self):
        address = self.take(4096)
        queue(self.one, address, 4096)
        self.other.wait_for(self.one)
        record_stream(address, self.other.handle)
        with self.other.hold():
            # Queued after record_stream and before the free, as PyTorch allows.
            queue(self.other, address, 4096)
            self.give(address)
            again = [self.take(4096) for _ in range(8)]
            for each in again:
                queue(self.one, each, 4096)
        runtime.synchronize()
        self.assertEqual(runtime.races(), [])
        for each in again:
            self.give(each)

    def test_memory_of_one_stream_serves_another_in_order(self):
        for _ in range(20):
            address = self.take(40 << 20)
            queue(self.one, address, 40 << 20)
            self.give(address)
            # The limit has no room for a second one.
            address = self.take(40 << 20, self.other)
            queue(self.other, address, 40 << 20)
            self.give(address, self.other)

    def test_threads_free_what_others_have_allocated(self):
        addresses = [self.take(4096) for _ in range(64)]

        def give_all():
            while addresses:
                try:
                    address = addresses.pop()
                except IndexError:
                    return
                self.give(address)
                self.give(self.take(8192, self.other), self.other)

        threads = [threading.Thread(target=give_all) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def test_statistics_have_current_peak_and_totals(self):
        _native.torch_reset_peaks(_native.TORCH_GLOBAL, 0)
        _native.torch_reset_totals(_native.TORCH_GLOBAL, 0)
        self.give(self.take(1 << 20))
        address = self.take(1000)
        counts = statistics()
        self.assertEqual(counts["allocated_bytes"]["current"] - self.live, 1024)
        self.assertEqual(counts["requested_bytes"]["allocated"], (1 << 20) + 1000)
        self.assertEqual(counts["allocated_bytes"]["peak"] - self.live, 1 << 20)
        self.assertEqual((counts["allocation"]["allocated"], counts["allocation"]["freed"]), (2, 1))
        self.assertGreaterEqual(counts["reserved_bytes"]["current"], 1024)
        self.give(address)

    def test_the_size_of_a_block_is_known_by_its_address(self):
        address = self.take(1000)
        size = ctypes.c_size_t(0)
        self.assertEqual(base_alloc(address, ctypes.byref(size)), address)
        self.assertEqual(size.value, 1024)
        self.assertEqual(base_alloc(address, None), address)
        self.give(address)

    def test_a_fraction_of_the_memory_is_a_limit(self):
        try:
            memory_fraction(0.0, 0)
            self.assertIsNone(allocate(1 << 20, 0, self.one.handle))
        finally:
            runtime.limit = LIMIT
        self.give(self.take(1 << 20))

    def test_an_emptied_cache_is_the_devices_again(self):
        self.give(self.take(16 << 20))
        runtime.synchronize()
        before = runtime.physical_bytes
        reset()
        self.assertLess(runtime.physical_bytes, before)

    def test_memory_whose_work_cannot_be_waited_for_is_kept(self):
        address = self.take(4096)
        record_stream(address, 123456)  # no stream, so the free waits for the device
        runtime._fail_next_wait()
        self.give(address)
        self.assertIn(address, live_addresses())
        reset()
        self.assertNotIn(address, live_addresses())


class Graphs(OnStreams):
    """What is allocated on a captured stream belongs to the graph."""

    def capture(self, pool=7):
        return Capture(self.one, pool)

    def test_memory_of_a_graph_is_not_handed_out_to_others(self):
        with self.capture():
            address = self.take(4096)
            self.give(address)
            self.assertEqual(self.take(4096), address, "the same stream of the same capture has its order")
            self.give(address)
        others = [self.take(4096, stream) for stream in STREAMS for _ in range(8)]
        self.assertNotIn(address, others)
        for other, stream in zip(others, [stream for stream in STREAMS for _ in range(8)]):
            self.give(other, stream)
        with self.capture():
            self.assertEqual(self.take(4096), address, "a capture into the same pool may")
            self.give(address)
        with self.capture(pool=8):
            elsewhere = self.take(4096)
            self.assertNotEqual(elsewhere, address, "a capture into another pool may not")
            self.give(elsewhere)
        for pool in (7, 7, 8):
            release_pool(0, pool, 0)

    def test_streams_of_one_capture_do_not_share_memory(self):
        runtime._set_capturing(self.other, True)
        with self.capture():
            address = self.take(4096)
            self.give(address)
            self.assertNotEqual(self.take(4096, self.other), address)
        runtime._set_capturing(self.other, False)
        # The second block stays live, as a static output does, and is freed after its graph.
        release_pool(0, 7, 0)
        held = outstanding()
        other = self.static_output()
        self.give(other)
        self.assertLess(outstanding(), held + (2 << 20))

    def static_output(self):
        with self.capture(pool=9):
            address = self.take(4096)
        release_pool(0, 9, 0)
        return address

    def tearDown(self):
        runtime.synchronize()
        self.assertEqual(runtime.races(), [])

    def test_a_recorded_stream_of_a_capture_keeps_the_memory_until_the_capture_ends(self):
        with self.capture(pool=14):
            address = self.take(4096)
            record_stream(address, self.other.handle)
            self.give(address)
            again = self.take(4096)
            self.assertNotEqual(again, address, "the other stream may still use it")
            self.give(again)
        with self.capture(pool=14):
            both = {self.take(4096), self.take(4096)}
            self.assertIn(address, both)
            for each in both:
                self.give(each)
        for _ in range(2):
            release_pool(0, 14, 0)

    def test_a_released_pool_gives_its_memory_back_once_no_block_is_live(self):
        before = outstanding()
        with self.capture(pool=11):
            address = self.take(1 << 20)
        self.assertGreater(outstanding(), before)
        release_pool(0, 11, 0)
        self.assertGreater(outstanding(), before, "a block is live")
        self.give(address)
        self.assertEqual(outstanding(), before)

    def test_a_shared_pool_stays_until_its_last_graph_is_destroyed(self):
        before = outstanding()
        with self.capture(pool=15):
            output = self.take(1 << 20)
        with self.capture(pool=15):
            self.give(self.take(1 << 20))
        release_pool(0, 15, 0)
        self.give(output)
        self.assertGreater(outstanding(), before, "the second graph uses its temporaries at every launch")
        release_pool(0, 15, 0)
        self.assertEqual(outstanding(), before)

    def test_memory_of_a_graph_whose_launches_cannot_be_waited_for_is_kept(self):
        with self.capture(pool=16):
            address = self.take(2 << 20)
            self.give(address)
        runtime._fail_next_wait()
        release_pool(0, 16, 0)
        self.assertIn(address, live_addresses(), "its last launch may still run")
        reset()
        self.assertNotIn(address, live_addresses())

    def test_ranges_of_a_graph_are_joined_again(self):
        with self.capture(pool=12):
            small = [self.take(256 << 10) for _ in range(8)]
            held = runtime.bytes_outstanding
            for address in small:
                self.give(address)
            large = self.take(2 << 20)
            self.assertEqual((large, runtime.bytes_outstanding), (min(small), held))
            self.give(large)
        release_pool(0, 12, 0)

    def test_memory_from_before_a_capture_is_freed_after_it(self):
        eager = self.take(4096)
        shared = self.take(4096)
        record_stream(shared, self.other.handle)
        runtime._set_capturing(self.other, True)
        with self.capture():
            self.give(eager)
            self.give(shared)
        runtime._set_capturing(self.other, False)
        release_pool(0, 7, 0)
        # The next free also frees what was kept.
        self.give(self.take(512))
        runtime.reap()
        self.assertFalse({eager, shared} & live_addresses())

    def test_a_capture_that_was_not_announced_has_memory_of_its_own(self):
        eager = self.take(4096)
        self.give(eager)
        runtime._set_capturing(self.one, True)
        captured = self.take(4096)
        self.give(captured)
        runtime._set_capturing(self.one, False)
        self.assertNotEqual(captured, eager)
        again = self.take(4096)
        self.assertNotEqual(again, captured)
        self.give(again)

    def test_no_wait_for_the_device_is_made_while_a_capture_is_announced(self):
        lent = runtime.empty([4096])
        numba = _native.Allocator(0)
        address = numba.malloc(4096, None)
        begin_pool(0, 18, 0, None)
        try:
            held = runtime.bytes_outstanding
            for wait in (runtime.synchronize, lambda: lent.__dlpack__(stream=-1)):
                with self.assertRaisesRegex(Exception, "PyTorch captures a CUDA graph.*wait after the capture"):
                    wait()
            numba.free(address, None)
            reset()
            self.assertEqual(runtime.bytes_outstanding, held, "freed without a wait")
            with self.assertRaisesRegex(Exception, "PyTorch captures"):
                runtime.reap()
        finally:
            end_pool(0, 18, 0)
        runtime.synchronize()
        self.assertEqual(runtime.bytes_outstanding, held - 4096)
        release_pool(0, 18, 0)

    def test_a_capture_that_pytorch_abandons_is_not_announced_for_ever(self):
        current = [1]

        class Graph:
            """Announces as PyTorch does. `resets`: also ends a failed begin itself, as newer versions do."""

            def __init__(self, resets=False):
                self.resets, self.announced = resets, False

            def capture_begin(self, fails=False):
                begin_pool(0, 19, 0, None)
                self.announced = True
                if fails:
                    raise RuntimeError("the driver refuses")

            def capture_end(self, fails=False):
                if current != [1]:
                    raise RuntimeError("another stream")
                if fails:
                    raise RuntimeError("the capture was broken")
                end_pool(0, 19, 0)
                self.announced = False

            def reset(self):
                if self.resets and self.announced:
                    end_pool(0, 19, 0)
                    release_pool(0, 19, 0)
                    self.announced = False

        _captures.patch(Graph, lambda: current[0])
        held, graph = outstanding(), Graph()
        graph.capture_begin()
        outer = _native.torch_last_capture()
        for resets in (False, True):
            failing = Graph(resets)
            with self.assertRaisesRegex(RuntimeError, "refuses"):
                failing.capture_begin(fails=True)
            failing.reset()
            self.assertEqual(_native.torch_last_capture(), outer, "the outer one is still open")
        with self.assertRaisesRegex(RuntimeError, "broken"):
            Graph().capture_end(fails=True)
        current[0] = 2
        with self.assertRaisesRegex(RuntimeError, "another stream"):
            graph.capture_end()
        current[0] = 1
        self.assertEqual(_native.torch_last_capture(), outer)
        runtime._set_capturing(self.one, True)
        address = self.take(4096)
        runtime._set_capturing(self.one, False)
        with self.assertRaisesRegex(RuntimeError, "broken"):
            graph.capture_end(fails=True)
        self.assertEqual(_native.torch_last_capture(), 0)
        self.give(address)
        runtime.synchronize()
        self.assertEqual(outstanding(), held, "its graph will never be destroyed")
        whole = Graph()
        whole.capture_begin()
        whole.capture_end()
        self.assertEqual(_native.torch_last_capture(), 0)
        release_pool(0, 19, 0)

    def test_the_limit_counts_memory_of_graphs(self):
        with self.capture(pool=13):
            self.assertIsNone(allocate(LIMIT + 1, 0, self.one.handle))
        release_pool(0, 13, 0)


class Capture:
    """A capture of PyTorch on a stream, into a pool of graphs."""

    def __init__(self, stream, pool):
        self.stream, self.pool = stream, pool

    def __enter__(self):
        begin_pool(0, self.pool, 0, None)
        runtime._set_capturing(self.stream, True)

    def __exit__(self, *_):
        runtime._set_capturing(self.stream, False)
        end_pool(0, self.pool, 0)


class Segments(unittest.TestCase):
    """The functions of a `torch.cuda.MemPool`."""

    def setUp(self):
        self.pool = _native.torch_new_pool(limit="8MiB")
        self.allocate = function(f"xlogmem_pool_alloc_{self.pool}", VOID, SIZE, INT, VOID)
        self.free = function(f"xlogmem_pool_free_{self.pool}", None, VOID, SIZE, INT, VOID)

    def test_a_pool_has_a_limit_and_says_why_it_refused(self):
        kept = [self.allocate(2 << 20, 0, None) for _ in range(4)]
        self.assertEqual(len(set(kept)), 4)
        self.assertIsNone(self.allocate(2 << 20, 0, None))
        self.assertIn("8 MiB", _native.torch_last_refusal(self.pool))
        self.assertEqual(_native.torch_statistics(self.pool, 0)["reserved_bytes"]["current"], 8 << 20)
        self.assertEqual(_native.torch_pool_runtime(self.pool, 0).remaining, 0)
        self.free(kept.pop(), 0, 0, None)
        kept.append(self.allocate(2 << 20, 0, None))
        self.assertIsNotNone(kept[-1])
        for address in kept:
            self.free(address, 0, 0, None)
        self.assertEqual(_native.torch_pool_runtime(self.pool, 0).bytes_outstanding, 0)

    def test_a_pool_that_was_not_made_and_bad_devices_hand_out_nothing(self):
        other = function("xlogmem_pool_alloc_15", VOID, SIZE, INT, VOID)
        self.assertIsNone(other(4096, 0, None))
        self.assertIsNone(self.allocate(4096, -1, None))
        self.assertIsNone(self.allocate(0, 0, None))
        with self.assertRaises(ValueError):
            _native.torch_statistics(99, 0)
        with self.assertRaises(ValueError):
            _native.torch_statistics(self.pool, -1)


def queue(stream, address, size):
    """Work of PyTorch: queued on the stream without an announcement."""
    runtime._queue_fill_at(stream, address, size, 6)


def live_addresses():
    return {block["ptr"] for block in runtime.snapshot()["blocks"]}


def outstanding():
    runtime.reap()
    return runtime.bytes_outstanding


if __name__ == "__main__":
    unittest.main()
