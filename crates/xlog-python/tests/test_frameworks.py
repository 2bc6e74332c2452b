"""CuPy, Numba, cuda.core and RMM by stand-ins with their interfaces, on the simulated device. On a GPU tests/gpu runs the real ones."""

import importlib
import sys
import types
import unittest

from shared_sim import LIMIT, runtime

import xlogmem
from xlogmem import _native
from xlogmem._streams import handle


def stand_in(name, **attributes):
    """A module that is imported instead of a framework."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def fresh(name):
    """The part of xlogmem for a framework, imported anew."""
    sys.modules.pop(f"xlogmem.{name}", None)
    return importlib.import_module(f"xlogmem.{name}")


def live_addresses():
    return {block["ptr"] for block in runtime.snapshot()["blocks"]}


class WithoutRaces(unittest.TestCase):
    def setUp(self):
        self.before = set(sys.modules)
        self.stream, self.other = runtime.stream(), runtime.stream()
        # Graphs of other tests keep their memory.
        runtime.reap()
        self.held = runtime.bytes_outstanding

    def tearDown(self):
        for name in set(sys.modules) - self.before:
            del sys.modules[name]
        runtime.synchronize()
        self.assertEqual(runtime.races(), [])
        runtime.reap()
        self.assertEqual(runtime.bytes_outstanding, self.held)


class Addresses(WithoutRaces):
    def test_memory_is_ready_on_its_stream_and_freed_after_the_work_there(self):
        allocator = _native.Allocator(0)
        for _ in range(20):
            address = allocator.malloc(4096, self.stream.handle)
            with self.stream.hold():
                runtime._queue_fill_at(self.stream, address, 4096, 1)
                allocator.free(address, [self.stream.handle])
                again = allocator.malloc(4096, self.other.handle)
                runtime._queue_fill_at(self.other, again, 4096, 2)
            allocator.free(again, [self.other.handle])
        self.assertEqual(len(allocator), 0)

    def test_without_a_stream_memory_is_ready_everywhere_and_freed_after_everything(self):
        allocator = _native.Allocator(0)
        address = allocator.malloc(4096)
        runtime._queue_fill_at(self.stream, address, 4096, 1)
        self.other.wait_for(self.stream)
        runtime._queue_fill_at(self.other, address, 4096, 2)
        allocator.free(address)
        again = allocator.malloc(4096)
        runtime._queue_fill_at(self.stream, again, 4096, 3)
        allocator.free(again)

    def test_what_is_not_live_is_refused_and_the_limit_holds(self):
        allocator = _native.Allocator(0)
        self.assertEqual(allocator.malloc(0), 0)
        allocator.free(0)
        with self.assertRaises(ValueError):
            allocator.free(4096)
        with self.assertRaises(MemoryError):
            allocator.malloc(LIMIT + 1, self.stream.handle)
        with self.assertRaises(xlogmem.XlogError):
            allocator.malloc(64, 123456)
        free, total = allocator.memory_info()
        self.assertEqual((free, total), (LIMIT - self.held, LIMIT))

    def test_a_captured_stream_is_refused(self):
        allocator = _native.Allocator(0)
        runtime._set_capturing(self.stream, True)
        try:
            with self.assertRaises(xlogmem.XlogError) as caught:
                allocator.malloc(64, self.stream.handle)
        finally:
            runtime._set_capturing(self.stream, False)
        self.assertIn("capture", str(caught.exception))

    def test_a_free_on_a_captured_stream_is_made_up_for_afterwards(self):
        allocator = _native.Allocator(0)
        address = allocator.malloc(4096, self.stream.handle)
        runtime._queue_fill_at(self.stream, address, 4096, 1)
        runtime._set_capturing(self.stream, True)
        try:
            allocator.free(address, [self.stream.handle])
            self.assertIn(address, live_addresses())
            again = allocator.malloc(4096, self.other.handle)
            self.assertNotEqual(again, address)
        finally:
            runtime._set_capturing(self.stream, False)
        allocator.free(again, [self.other.handle])
        runtime.reap()
        self.assertNotIn(address, live_addresses())

    def test_memory_of_a_free_on_a_captured_stream_serves_when_memory_is_short(self):
        allocator = _native.Allocator(0)
        address = allocator.malloc(LIMIT // 4 * 3, self.stream.handle)
        runtime._set_capturing(self.stream, True)
        try:
            allocator.free(address, [self.other.handle, self.stream.handle])
        finally:
            runtime._set_capturing(self.stream, False)
        # The captured stream may be gone by now: no call names it again.
        again = allocator.malloc(LIMIT // 4 * 3, self.other.handle)
        allocator.free(again, [self.other.handle])

    def test_a_free_whose_wait_fails_is_made_up_for_afterwards(self):
        allocator = _native.Allocator(0)
        for streams in (None, [123456]):
            address = allocator.malloc(4096)
            runtime._fail_next_wait()
            allocator.free(address, streams)
            self.assertEqual(len(allocator), 0)
            self.assertIn(address, live_addresses())
            allocator.free(allocator.malloc(64))
            self.assertNotIn(address, live_addresses())


class Streams(unittest.TestCase):
    def test_a_stream_of_every_framework_has_a_number(self):
        simple = types.SimpleNamespace
        self.assertEqual(handle(None), 0)
        self.assertEqual(handle(7), 7)
        self.assertEqual(handle(simple(ptr=8)), 8)
        self.assertEqual(handle(simple(cuda_stream=9)), 9)
        self.assertEqual(handle(simple(__cuda_stream__=lambda: (0, 10))), 10)
        self.assertEqual(handle(simple(__cuda_stream__=(0, 11))), 11)
        self.assertEqual(handle(simple(handle=simple(value=None))), 0)
        with self.assertRaises(TypeError):
            handle("stream")


class CuPy(WithoutRaces):
    def test_arrays_are_allocated_and_freed_in_the_order_of_the_current_stream(self):
        current = [types.SimpleNamespace(ptr=self.stream.handle)]

        class PythonFunctionAllocator:
            def __init__(self, malloc, free):
                self.functions = malloc, free

            def malloc(self, size):
                return self.functions[0](size, 0)

        chosen = []
        cuda = types.SimpleNamespace(
            PythonFunctionAllocator=PythonFunctionAllocator,
            get_current_stream=lambda: current[0],
            set_allocator=chosen.append,
        )
        pool = types.SimpleNamespace(malloc="the pool of cupy")
        stand_in("cupy", cuda=cuda, get_default_memory_pool=lambda: pool)
        module = fresh("cupy")
        module.enable()
        allocate, free = chosen[-1].__self__.functions
        address = allocate(4096, 0)
        with self.stream.hold():
            runtime._queue_fill_at(self.stream, address, 4096, 1)
            # The last reference goes outside of `with stream:`.
            current[0] = types.SimpleNamespace(ptr=self.other.handle)
            free(address, 0)
            again = allocate(4096, 0)
            runtime._queue_fill_at(self.other, again, 4096, 2)
        free(again, 0)
        self.assertEqual(allocate(0, 0), 0)
        free(0, 0)
        with self.assertRaises(xlogmem.OutOfBudget):
            allocate(LIMIT + 1, 0)
        self.assertEqual(module._streams, {})
        module.disable()
        self.assertEqual(chosen[-1], "the pool of cupy")


class Numba(WithoutRaces):
    def test_the_manager_follows_the_interface(self):
        class HostOnlyCUDAMemoryManager:
            def __init__(self, context):
                self.context = context
                self.allocations = {}

            def initialize(self):
                pass

            def reset(self):
                self.allocations.clear()

        class MemoryPointer:
            def __init__(self, context, pointer, size, finalizer):
                self.pointer, self.size, self.finalizer = pointer, size, finalizer

        class Context:
            device = types.SimpleNamespace(id=0)

        cuda = types.ModuleType("numba.cuda")
        vars(cuda).update(
            HostOnlyCUDAMemoryManager=HostOnlyCUDAMemoryManager,
            MemoryPointer=MemoryPointer,
            MemoryInfo=lambda free, total: (free, total),
        )
        stand_in("numba", cuda=cuda)
        sys.modules["numba.cuda"] = cuda
        driver = types.SimpleNamespace(binding=types.SimpleNamespace(CUdeviceptr=int))
        stand_in("numba.cuda.cudadrv", driver=driver)
        module = fresh("numba")
        context = Context()
        manager = module._numba_memory_manager(context=context)
        self.assertEqual(manager.interface_version, 1)
        manager.reset()
        memory = manager.memalloc(4096)
        runtime._queue_fill_at(self.stream, memory.pointer, 4096, 1)
        self.assertEqual(manager.get_memory_info()[1], LIMIT)
        memory.finalizer()
        # A Numba without the bindings of cuda-python.
        driver.USE_NV_BINDING, driver.drvapi = False, types.SimpleNamespace(cu_device_ptr=lambda address: (address,))
        manager.memalloc(64).finalizer()
        with self.assertRaises(MemoryError):
            manager.memalloc(LIMIT + 1)
        with self.assertRaises(NotImplementedError):
            manager.get_ipc_handle(memory)


class CudaCore(WithoutRaces):
    def test_the_resource_follows_the_interface(self):
        class Base:
            pass

        class Buffer:
            @classmethod
            def from_handle(cls, ptr, size, mr, stream):
                buffer = cls()
                buffer.handle, buffer.size, buffer.memory_resource = ptr, size, mr
                return buffer

        stand_in("cuda")
        stand_in("cuda.core", Buffer=Buffer, MemoryResource=Base)
        module = fresh("_cuda_core")
        resource = module.MemoryResource(0)
        self.assertTrue(issubclass(xlogmem.MemoryResource, Base))
        buffer = resource.allocate(4096, stream=self.stream)
        runtime._queue_fill_at(self.stream, buffer.handle, 4096, 1)
        resource.deallocate(buffer.handle, 4096, stream=self.stream)
        self.assertEqual((resource.device_id, resource.is_device_accessible, resource.is_host_accessible), (0, True, False))
        with self.assertRaises(MemoryError):
            resource.allocate(LIMIT + 1, stream=self.stream)


class Rmm(WithoutRaces):
    def test_the_callbacks_follow_the_interface(self):
        resources = []

        class CallbackMemoryResource:
            def __init__(self, allocate, deallocate):
                self.functions = allocate, deallocate
                resources.append(self)

        stand_in("rmm", mr=types.SimpleNamespace(CallbackMemoryResource=CallbackMemoryResource))
        upstream = fresh("rmm").upstream(0)
        allocate, deallocate = upstream.functions
        address = allocate(1 << 20, self.stream)
        runtime._queue_fill_at(self.stream, address, 1 << 20, 1)
        deallocate(address, 1 << 20, self.stream)
        with self.assertRaises(MemoryError):
            allocate(LIMIT + 1, self.stream)


if __name__ == "__main__":
    unittest.main()
