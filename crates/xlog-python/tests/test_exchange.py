"""Memory in and out by DLPack, on the simulated device: its race detector shows the order."""

import gc
import subprocess
import sys
import threading
import unittest

import xlogmem


class Sim(unittest.TestCase):
    def setUp(self):
        self.runtime = xlogmem.open("sim")

    def tearDown(self):
        self.assertEqual(self.runtime.races(), [])

    def live_addresses(self):
        return {block["ptr"] for block in self.runtime.snapshot()["blocks"]}

    def test_memory_of_the_simulated_device_is_not_taken_for_cuda(self):
        buffer = self.runtime.allocate(16)
        self.assertEqual(buffer.__dlpack_device__(), (12, 0))
        self.assertFalse(hasattr(buffer, "__cuda_array_interface__"))

    def test_values_come_through_and_both_sides_share_the_memory(self):
        buffer = self.runtime.empty((4, 8), "int32")
        buffer.copy_from(bytes(range(128)))
        taken = self.runtime.from_array(buffer)
        self.assertEqual((taken.ptr, taken.shape, taken.dtype), (buffer.ptr, (4, 8), "int32"))
        self.assertEqual(taken.to_bytes(), bytes(range(128)))
        taken.fill(1)
        del taken
        gc.collect()
        self.assertEqual(buffer.to_bytes(), b"\x01" * 128)

    def test_the_consumer_waits_for_work_that_is_still_queued(self):
        for seed in range(20):
            self.runtime = xlogmem.open(f"sim:{seed}")
            producer, consumer = self.runtime.stream(), self.runtime.stream()
            buffer = self.runtime.allocate(4096, stream=producer)
            with producer.hold():
                buffer.fill(5)
                capsule = buffer.__dlpack__(stream=consumer.handle)
                foreign_fill(self.runtime, consumer, buffer)
            del capsule
            # The consumer is done: our read is ordered after its work.
            self.assertEqual(buffer.to_bytes(), b"\x06" * 4096)
            self.assertEqual(self.runtime.races(), [])

    def test_without_the_hand_over_the_detector_finds_the_race(self):
        # In a process of its own: the device reports the race once more when it goes.
        program = (
            "import xlogmem\n"
            "runtime = xlogmem.open('sim:1')\n"
            "producer, consumer = runtime.stream(), runtime.stream()\n"
            "buffer = runtime.allocate(4096, stream=producer)\n"
            "with producer.hold():\n"
            "    buffer.fill(5)\n"
            "    runtime._queue_fill(consumer, buffer, 6)\n"
            "try:\n"
            "    producer.synchronize()\n"
            "    consumer.synchronize()\n"
            "except xlogmem.DriverError:\n"
            "    print(runtime.races() != [])\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
        self.assertEqual(done.stdout.strip(), "True", done.stderr)

    def test_memory_lives_as_long_as_its_capsule(self):
        buffer = self.runtime.allocate(1 << 20)
        capsule = buffer.__dlpack__(stream=-1)
        with self.assertRaises(BufferError):
            buffer.free()
        del buffer
        gc.collect()
        self.runtime.reap()
        self.assertGreaterEqual(self.runtime.bytes_outstanding, 1 << 20)
        del capsule
        gc.collect()
        self.runtime.reap()
        self.assertEqual(self.runtime.bytes_outstanding, 0)

    def test_a_capsule_that_a_thread_drops_returns_the_memory(self):
        capsules = [self.runtime.allocate(4096).__dlpack__(max_version=(1, 1)) for _ in range(16)]
        threads = [threading.Thread(target=capsules.pop) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.runtime.reap()
        self.assertEqual(self.runtime.bytes_outstanding, 0)

    def test_the_owner_gets_its_memory_back_after_our_work(self):
        producer = self.runtime.stream()
        buffer = self.runtime.allocate(4096, stream=producer)
        taken = self.runtime.from_array(buffer)
        taken.fill(3)
        del taken
        gc.collect()
        # The producer's own work is not announced.
        foreign_fill(self.runtime, producer, buffer)
        producer.synchronize()
        self.assertEqual(buffer.to_bytes(), b"\x06" * 4096)

    def test_work_of_another_library_is_recorded_before_the_free(self):
        foreign = self.runtime.stream()
        buffer = self.runtime.allocate(4096)
        buffer.__dlpack__(stream=foreign.handle)
        with foreign.hold():
            foreign_fill(self.runtime, foreign, buffer)
            buffer.record_use(foreign.handle)
            buffer.free()
            again = self.runtime.allocate(4096)
            again.fill(1)
        self.assertEqual(again.to_bytes(), b"\x01" * 4096)

    def test_memory_stays_until_a_wait_for_its_consumer_succeeds(self):
        for ends in (lambda buffers: buffers[0].free(), lambda buffers: None):
            foreign = self.runtime.stream()
            buffers = [self.runtime.allocate(4096)]
            address = buffers[0].ptr
            buffers[0].__dlpack__(stream=-1)  # a consumer that is done, and has named no stream
            with foreign.hold():
                foreign_fill(self.runtime, foreign, buffers[0])
                self.runtime._fail_next_wait()
                ends(buffers)
                buffers.clear()
                gc.collect()
                self.assertIn(address, self.live_addresses())
                again = self.runtime.allocate(4096)
                again.fill(1)
            self.runtime.synchronize()
            self.assertNotIn(address, self.live_addresses())
            self.assertEqual(again.to_bytes(), b"\x01" * 4096)

    def test_the_owner_gets_its_memory_back_only_after_a_wait_that_succeeds(self):
        buffer = self.runtime.allocate(4096)
        taken = self.runtime.from_array(buffer)
        taken.__dlpack__(stream=-1)
        self.runtime._fail_next_wait()
        del taken
        gc.collect()
        with self.assertRaises(BufferError):
            buffer.free()
        self.runtime.synchronize()
        buffer.free()

    def test_memory_that_waits_for_its_consumer_serves_when_memory_is_short(self):
        runtime = xlogmem.open("sim", limit="1MiB")
        buffer = runtime.allocate(768 << 10)
        buffer.__dlpack__(stream=-1)
        runtime._fail_next_wait()
        buffer.free()
        self.assertEqual(runtime.allocate(768 << 10).nbytes, 768 << 10)

    def test_a_buffer_is_not_freed_while_it_is_handed_out(self):
        busy = self.runtime.stream()
        buffer = self.runtime.allocate(4096)
        handed_out, refused = [], []

        def hand_out():
            try:
                handed_out.append(buffer.__dlpack__(stream=-1))
            except xlogmem.XlogError:
                pass

        def free():
            try:
                buffer.free()
            except BufferError:
                refused.append(True)

        threads = [threading.Thread(target=work) for work in (hand_out, free)]
        with busy.hold():
            for thread in threads:
                thread.start()
                # The hand-over waits for the held stream, so that the free comes in between. Any other order ends well too.
                thread.join(0.2)
        for thread in threads:
            thread.join()
        self.assertEqual(bool(handed_out), bool(refused))
        self.assertEqual(bool(handed_out), not buffer.is_freed)

    def test_a_consumer_ends_beside_a_thread_that_waits_for_python(self):
        # In a process of its own: a wait with the interpreter's lock would stop all of it.
        program = (
            "import threading, time, xlogmem\n"
            "runtime = xlogmem.open('sim')\n"
            "stream = runtime.stream()\n"
            "buffer = runtime.allocate(64, stream=stream)\n"
            "capsule = buffer.__dlpack__(stream=runtime.default_stream.handle)\n"
            "hold = stream.hold()\n"
            "hold.__enter__()\n"
            "buffer.fill(1)\n"
            "reader = threading.Thread(target=buffer.to_bytes)\n"
            "reader.start()\n"
            "threading.Timer(0.4, hold.__exit__).start()\n"
            "time.sleep(0.2)\n"  # the reader waits for the held stream by now; if not, nothing has to wait
            "del capsule\n"
            "reader.join()\n"
            "print('ended')\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
        # The simulated device ends a wait that cannot end by an exception, after a minute.
        self.assertEqual((done.stdout.strip(), done.stderr), ("ended", ""))

    def test_what_cannot_be_exported_is_refused(self):
        buffer = self.runtime.allocate(16)
        with self.assertRaises(BufferError):
            buffer.__dlpack__(copy=True)
        with self.assertRaises(BufferError):
            buffer.__dlpack__(dl_device=(1, 0))
        with self.assertRaises(ValueError):
            buffer.__dlpack__(stream=-7)
        with self.assertRaises(xlogmem.XlogError):
            buffer.__dlpack__(stream=123456)

    def test_arrays_of_other_devices_and_other_objects_are_refused(self):
        class OnHost:
            def __dlpack_device__(self):
                return (1, 0)

            def __dlpack__(self, **_):
                raise AssertionError("an array of another device is not asked for")

        with self.assertRaises(BufferError) as caught:
            self.runtime.from_array(OnHost())
        self.assertIn("(1, 0)", str(caught.exception))
        with self.assertRaises(TypeError):
            self.runtime.from_array(b"bytes")

    def test_a_producer_of_before_version_1_is_accepted(self):
        buffer = self.runtime.allocate(16)
        buffer.fill(2)

        class Old:
            def __dlpack_device__(self):
                return buffer.__dlpack_device__()

            def __dlpack__(self, stream=None):
                return buffer.__dlpack__(stream=stream)

        self.assertEqual(self.runtime.from_array(Old()).to_bytes(), b"\x02" * 16)

    def test_an_empty_array_has_no_memory(self):
        buffer = self.runtime.empty((0, 4), "float32")
        taken = self.runtime.from_array(buffer)
        self.assertEqual((taken.shape, taken.to_bytes()), ((0, 4), b""))


def foreign_fill(runtime, stream, buffer):
    """Work of another library: queued on the stream without an announcement."""
    runtime._queue_fill(stream, buffer, 6)


if __name__ == "__main__":
    unittest.main()
