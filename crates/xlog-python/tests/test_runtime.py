"""The runtime in Python, on the simulated device."""

import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest
import weakref

import xlogmem


class Memory(unittest.TestCase):
    def test_bytes_come_back_as_they_were_written(self):
        runtime = xlogmem.open("sim")
        data = bytes(range(256)) * 16
        buffer = runtime.allocate(len(data))
        buffer.copy_from(data)
        self.assertEqual(buffer.to_bytes(), data)
        other = runtime.empty((32, 32), "float32", stream=runtime.stream())
        other.copy_from_device(buffer)
        self.assertEqual(other.to_bytes(), data)
        self.assertEqual((other.shape, other.dtype, other.nbytes, len(other)), ((32, 32), "float32", 4096, 32))
        self.assertEqual(runtime.races(), [])

    def test_a_source_of_another_size_is_refused(self):
        runtime = xlogmem.open("sim")
        buffer = runtime.allocate(16)
        with self.assertRaises(xlogmem.InvalidRequest) as caught:
            buffer.copy_from(b"short")
        self.assertIn("16", caught.exception.accepted)
        with self.assertRaises(TypeError):
            buffer.copy_from(7)

    def test_a_dropped_buffer_is_freed(self):
        runtime = xlogmem.open("sim")
        buffer = runtime.allocate(1 << 20)
        self.assertGreaterEqual(runtime.bytes_outstanding, 1 << 20)
        gone = weakref.ref(buffer)
        del buffer
        gc.collect()
        self.assertIsNone(gone())
        runtime.reap()
        self.assertEqual(runtime.bytes_outstanding, 0)

    def test_a_freed_buffer_refuses_work(self):
        buffer = xlogmem.open("sim").allocate(16)
        buffer.free()
        self.assertTrue(buffer.is_freed)
        with self.assertRaises(xlogmem.XlogError):
            buffer.to_bytes()
        buffer.free()

    def test_copies_on_another_stream_wait_for_the_first(self):
        for seed in range(20):
            runtime = xlogmem.open(f"sim:{seed}")
            first, second = runtime.stream(), runtime.stream()
            buffer = runtime.allocate(4096, stream=first)
            buffer.copy_from(b"\x07" * 4096)
            self.assertEqual(buffer.to_bytes(stream=second), b"\x07" * 4096)
            self.assertEqual(runtime.races(), [])

    def test_a_held_stream_runs_later_and_is_waited_for(self):
        runtime = xlogmem.open("sim")
        stream = runtime.stream()
        buffer = runtime.allocate(64, stream=stream)
        with stream.hold():
            buffer.fill(9)
            self.assertFalse(stream.query())
        self.assertEqual(buffer.to_bytes(stream=runtime.default_stream), b"\x09" * 64)

    def test_a_stream_of_another_runtime_is_refused(self):
        one, other = xlogmem.open("sim"), xlogmem.open("sim")
        with self.assertRaises(xlogmem.InvalidRequest):
            one.allocate(16, stream=other.stream())
        with self.assertRaises(xlogmem.InvalidRequest):
            one.allocate(16).to_bytes(stream=other.stream())

    def test_bad_shapes_and_types_are_refused_by_name(self):
        runtime = xlogmem.open("sim")
        for shape, dtype in [((-1,), "uint8"), ((1 << 62, 1 << 62), "uint8"), ((4,), "float8")]:
            with self.assertRaises(ValueError) as caught:
                runtime.empty(shape, dtype)
            self.assertTrue(str(shape[0]) in str(caught.exception) or dtype in str(caught.exception))

    def test_copies_of_two_threads_in_both_directions_end(self):
        runtime = xlogmem.open("sim")
        one, other = runtime.allocate(64), runtime.allocate(64)

        def copies(into, source):
            for _ in range(200):
                into.copy_from_device(source)

        threads = [threading.Thread(target=copies, args=pair) for pair in [(one, other), (other, one)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        self.assertFalse(any(thread.is_alive() for thread in threads))


class Limits(unittest.TestCase):
    def test_a_refusal_is_a_memory_error_with_its_numbers_and_report(self):
        runtime = xlogmem.open("sim", limit="1MiB")
        with xlogmem.tag("rows"):
            rows = runtime.allocate(768 << 10)
        with self.assertRaises(MemoryError) as caught:
            runtime.allocate(512 << 10, tag="more")
        error = caught.exception
        self.assertIsInstance(error, xlogmem.OutOfBudget)
        self.assertEqual((error.requested, error.remaining), (512 << 10, 256 << 10))
        self.assertEqual(error.report["cause"], "budget")
        self.assertEqual(error.report["tags"][0]["tag"], "rows")
        self.assertEqual(runtime.last_oom()["requested"], 512 << 10)
        self.assertEqual(xlogmem.last_oom()["tag"], "more")
        copy = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(copy), copy.remaining), (xlogmem.OutOfBudget, 256 << 10))
        del rows
        runtime.allocate(512 << 10)

    def test_a_scope_limits_its_thread_and_no_other(self):
        runtime = xlogmem.open("sim", limit="64MiB")
        with runtime.scope("tenant", "1MiB", soft="512KiB") as scope:
            kept = runtime.allocate(1 << 20)
            with self.assertRaises(xlogmem.OutOfBudget) as caught:
                runtime.allocate(1)
            self.assertEqual(caught.exception.report["refused_by"], "scope")
            other = []
            thread = threading.Thread(target=lambda: other.append(runtime.allocate(4 << 20)))
            thread.start()
            thread.join()
            self.assertEqual(len(other), 1)
        self.assertEqual((scope.used, scope.hard, scope.soft), (1 << 20, 1 << 20, 512 << 10))
        runtime.allocate(4 << 20)
        del kept
        runtime.reap()
        self.assertEqual(scope.used, 0)

    def test_scopes_nest_and_leave_in_any_way(self):
        runtime = xlogmem.open("sim", limit="64MiB")
        with runtime.budget("8MiB") as outer, outer.scope("inner", 1 << 20) as inner:
            self.assertEqual(inner.name, "budget/inner")
            with self.assertRaises(xlogmem.OutOfBudget):
                runtime.allocate(2 << 20)
        runtime.allocate(16 << 20)
        with self.assertRaises(ZeroDivisionError), runtime.budget("1MiB"):
            1 / 0
        runtime.allocate(16 << 20)

    def test_a_scope_that_another_thread_entered_is_not_left_here(self):
        scope = xlogmem.open("sim").budget("1MiB")
        entered = threading.Thread(target=scope.__enter__)
        entered.start()
        entered.join()
        with self.assertRaises(RuntimeError):
            scope.__exit__(None, None, None)

    def test_the_limit_can_be_changed_and_takes_sizes_and_shares(self):
        runtime = xlogmem.open("sim", limit=1 << 20)
        self.assertEqual(runtime.limit, 1 << 20)
        runtime.limit = "2MiB"
        self.assertEqual((runtime.limit, runtime.remaining), (2 << 20, 2 << 20))
        with self.assertRaises(xlogmem.BadSetting) as caught:
            runtime.limit = "4 apples"
        self.assertEqual(caught.exception.value, "4 apples")
        with self.assertRaises(xlogmem.InvalidRequest):
            runtime.limit = -1


class Settings(unittest.TestCase):
    def test_a_bad_device_is_named(self):
        with self.assertRaises(ValueError) as caught:
            xlogmem.open("gpu")
        self.assertIsInstance(caught.exception, xlogmem.BadDeviceSpec)
        self.assertEqual(caught.exception.spec, "gpu")

    def test_a_missing_gpu_is_an_exception_that_names_it(self):
        with self.assertRaises(xlogmem.DeviceUnavailable) as caught:
            xlogmem.open("cuda:15")
        self.assertEqual(caught.exception.spec, "cuda:15")

    def test_unknown_settings_and_values_are_refused(self):
        with self.assertRaises(TypeError) as caught:
            xlogmem.open("sim", limits="1GiB")
        self.assertIn("limits", str(caught.exception))
        with self.assertRaises(xlogmem.BadSetting):
            xlogmem.open("sim", resource="pooled")

    def test_every_resource_opens(self):
        for kind in ["pool", "async", "direct"]:
            runtime = xlogmem.open("sim", resource=kind)
            buffer = runtime.allocate(64)
            buffer.fill(3)
            self.assertEqual(buffer.to_bytes(), b"\x03" * 64)

    def test_more_streams_than_the_maximum_are_refused_with_it(self):
        runtime = xlogmem.open("sim", max_streams=1)
        kept = runtime.stream()
        with self.assertRaises(xlogmem.StreamCapacity) as caught:
            runtime.stream()
        self.assertEqual(caught.exception.max, 1)
        del kept
        runtime.stream()


class Observation(unittest.TestCase):
    def test_statistics_count_by_tag_and_stream(self):
        runtime = xlogmem.open("sim")
        stream = runtime.stream()
        with xlogmem.tag("weights"):
            weights = runtime.allocate(1 << 20, stream=stream)
            with xlogmem.tag("inner"):
                inner = runtime.allocate(4096)
        counts = runtime.statistics()
        self.assertEqual(counts["by_tag"]["weights"]["current_bytes"], weights.nbytes)
        self.assertEqual(counts["by_tag"]["inner"]["allocations"], 1)
        self.assertEqual(counts["by_stream"][str(stream.id)]["current_blocks"], 1)
        self.assertEqual((weights.tag, inner.tag), ("weights", "inner"))
        del weights
        self.assertEqual(runtime.statistics()["by_tag"]["weights"]["current_bytes"], 0)

    def test_a_snapshot_lists_live_blocks_and_is_json(self):
        runtime = xlogmem.open("sim", limit="8MiB")
        buffer = runtime.allocate(4096, tag="rows")
        snapshot = json.loads(json.dumps(runtime.snapshot()))
        self.assertEqual([block["ptr"] for block in snapshot["blocks"]], [buffer.ptr])
        self.assertEqual(snapshot["blocks"][0]["tag"], "rows")
        self.assertEqual(snapshot["limit"], 8 << 20)
        self.assertGreaterEqual(snapshot["physical_bytes"], 4096)

    def test_a_log_has_what_happened_while_it_was_on(self):
        runtime = xlogmem.open("sim")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "run.csv")
            runtime.allocate(1111)
            runtime.log_on(path)
            runtime.allocate(2222, tag="logged")
            runtime.log_off()
            runtime.allocate(3333)
            with open(path, encoding="utf-8") as file:
                text = file.read()
            self.assertIn("logged", text)
            self.assertIn("2222", text)
            self.assertNotIn("1111", text)
            self.assertNotIn("3333", text)
            runtime.log_on(path)
            with self.assertRaises(xlogmem.LogInUse) as caught:
                xlogmem.open("sim").log_on(path)
            self.assertEqual(str(caught.exception.path), path)
            runtime.log_off()
            with self.assertRaises(ValueError):
                runtime.log_on(os.path.join(folder, "run.txt"))

    def test_the_report_is_a_page_that_a_notebook_shows(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "run.xtrace")
            runtime = xlogmem.open("sim", log=path)
            runtime.allocate(1 << 20, tag="rows")
            del runtime
            page = xlogmem.report(path)
            self.assertIn("<html", page.html)
            self.assertIn("rows", page.html)
            self.assertIn("<iframe srcdoc=", page._repr_html_())
            with self.assertRaises(RuntimeError) as caught:
                xlogmem.report(os.path.join(folder, "missing.xtrace"))
            self.assertIn("missing.xtrace", str(caught.exception))


class Installation(unittest.TestCase):
    def run_python(self, *arguments, **environment):
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, **environment},
        )

    def test_the_command_line_is_installed(self):
        done = self.run_python("-m", "xlogmem", "--version")
        self.assertEqual((done.returncode, done.stdout.split()[0]), (0, "xlogmem"))
        done = self.run_python("-m", "xlogmem", "run", "handoff", XLOG_DEVICE="sim:3")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_preloaded_library_is_part_of_the_command(self):
        done = self.run_python("-m", "xlogmem", "exec", "--", sys.executable, "-c", "import os; print(os.environ['LD_PRELOAD'])")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("preload", done.stdout)

    def test_types_are_part_of_the_package(self):
        folder = os.path.dirname(xlogmem.__file__)
        for name in ["py.typed", "_native.pyi"]:
            self.assertTrue(os.path.exists(os.path.join(folder, name)), name)

    def test_the_stubs_name_everything_that_the_module_has(self):
        import ast

        path = os.path.join(os.path.dirname(xlogmem.__file__), "_native.pyi")
        with open(path, encoding="utf-8") as file:
            stubs = ast.parse(file.read())
        functions = {node.name for node in stubs.body if isinstance(node, ast.FunctionDef)}
        classes = {
            node.name: {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            for node in stubs.body
            if isinstance(node, ast.ClassDef)
        }
        from xlogmem import _native

        for name, value in vars(_native).items():
            if name.startswith("__") or not callable(value):
                continue
            if isinstance(value, type):
                methods = {part for part in vars(value) if not part.startswith("__")}
                self.assertEqual(methods - classes.get(name, set()), set(), name)
            else:
                self.assertIn(name, functions)

    def test_a_process_ends_well_with_live_memory_and_streams(self):
        program = (
            "import xlogmem, threading\n"
            "runtime = xlogmem.open('sim')\n"
            "stream = runtime.stream()\n"
            "kept = [runtime.allocate(4096, stream=stream) for _ in range(8)]\n"
            "capsule = kept[0].__dlpack__()\n"
            "scope = runtime.budget('1MiB'); scope.__enter__()\n"
        )
        done = self.run_python("-c", program)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
