"""cuda.core on the shared runtime: `Device(0).memory_resource = xlogmem.MemoryResource(0)`."""

try:
    from cuda.core import Buffer, MemoryResource as _MemoryResource
except ImportError:
    from cuda.core.experimental import Buffer, MemoryResource as _MemoryResource

from ._native import Allocator
from ._streams import handle as _handle


class MemoryResource(_MemoryResource):
    """Memory of the shared runtime of a device, in the order of the stream of each call."""

    def __init__(self, device_id=0):
        self._device_id = int(device_id)
        self._allocator = Allocator(self._device_id)

    def allocate(self, size, *, stream=None):
        """Allocates a buffer that is ready on `stream`; without one, on every stream."""
        address = self._allocator.malloc(size, None if stream is None else _handle(stream))
        try:
            # The stream also orders the free of a buffer that is not closed on another one.
            return Buffer.from_handle(address, size, mr=self, stream=stream)
        except TypeError:
            # Before cuda.core 1.2.
            return Buffer.from_handle(address, size, mr=self)

    def deallocate(self, ptr, size, *, stream=None):
        """Frees an address after everything queued on `stream`; without one, on the device."""
        self._allocator.free(int(ptr), None if stream is None else [_handle(stream)])

    @property
    def is_device_accessible(self):
        return True

    @property
    def is_host_accessible(self):
        return False

    @property
    def device_id(self):
        return self._device_id
