"""Numba on the shared runtime: `NUMBA_CUDA_MEMORY_MANAGER=xlogmem.numba`, or `numba.cuda.set_memory_manager(xlogmem.numba.MemoryManager)`.

Numba names no stream: an allocation is ready on every stream, and a free waits for the device.
"""

import weakref as _weakref

from numba import cuda as _cuda

from ._native import Allocator


def _pointer(address):
    """An address as the driver calls of this Numba take it."""
    from numba.cuda.cudadrv import driver

    if getattr(driver, "USE_NV_BINDING", True):
        return driver.binding.CUdeviceptr(address)
    return driver.drvapi.cu_device_ptr(address)


class MemoryManager(_cuda.HostOnlyCUDAMemoryManager):
    """Numba's device memory from the shared runtime of the context's device. Pinned host memory stays Numba's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._allocator = None

    def initialize(self):
        if self._allocator is None:
            self._allocator = Allocator(int(self.context.device.id))

    def memalloc(self, size):
        self.initialize()
        allocator = self._allocator
        address = allocator.malloc(size)
        # The memory lives as long as this object.
        return _cuda.MemoryPointer(
            _weakref.proxy(self.context), _pointer(address), size, finalizer=lambda: allocator.free(address)
        )

    def get_memory_info(self):
        self.initialize()
        free, total = self._allocator.memory_info()
        return _cuda.MemoryInfo(free=free, total=total)

    def get_ipc_handle(self, memory):
        raise NotImplementedError("memory of a pool has no IPC handle; run with Numba's own memory manager for that")

    @property
    def interface_version(self):
        return 1


_numba_memory_manager = MemoryManager
