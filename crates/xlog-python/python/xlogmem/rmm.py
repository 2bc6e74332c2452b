"""RMM on the shared runtime.

`rmm.mr.set_current_device_resource(rmm.mr.PoolMemoryResource(xlogmem.rmm.upstream()))`: RMM's callback takes the interpreter's lock for each
call, so RMM's pool goes on top, and only its growth comes here.
"""

from ._native import Allocator, shared
from ._streams import handle as _handle

_LEGACY = 1  # and 0


def upstream(device=0):
    """A resource of RMM whose memory is that of the device's shared runtime."""
    import rmm

    allocator = Allocator(device)
    # A simulated device has no legacy default stream, which RMM uses if none is named: memory is then ready on all streams.
    is_simulated = shared(device).device.startswith("sim")

    def streams(stream):
        number = _handle(stream)
        return None if is_simulated and number <= _LEGACY else [number]

    def allocate(size, stream=None):
        on = streams(stream)
        return allocator.malloc(size, on and on[0])

    def deallocate(address, size, stream=None):
        allocator.free(address, streams(stream))

    return rmm.mr.CallbackMemoryResource(allocate, deallocate)
