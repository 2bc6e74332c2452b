"""CuPy on the shared runtime: `xlogmem.cupy.enable()`."""

import threading

import cupy as _cupy

from ._native import Allocator, configure
from ._streams import handle as _handle

_allocators = {}
_lock = threading.Lock()
# The stream object of each live address: CuPy destroys a stream that no object holds, and the free names it.
_streams = {}


def _allocator(device):
    with _lock:
        if device not in _allocators:
            _allocators[device] = Allocator(device)
        return _allocators[device]


def _malloc(size, device):
    if size == 0:
        return 0
    stream = _cupy.cuda.get_current_stream()
    address = _allocator(device).malloc(size, _handle(stream))
    _streams[device, address] = stream
    return address


def _free(address, device):
    if address == 0:
        return
    allocated_on = _streams.pop((device, address), None)
    try:
        current = _cupy.cuda.get_current_stream()
        streams = {_handle(stream) for stream in (allocated_on, current) if stream is not None}
    except Exception:
        # At the end of the process CuPy may be half gone: wait for the device instead.
        streams = None
    _allocator(device).free(address, None if streams is None else sorted(streams))


_function = None


def enable(device=None, **options):
    """Makes the shared runtime CuPy's allocator. Options are those of `xlogmem.configure`, before the first use of the device's runtime.

    Memory is allocated and freed in the order of CuPy's current stream. Raises `xlogmem.OutOfBudget` beyond the limit.
    """
    global _function
    if options:
        configure(0 if device is None else device, **options)
    # Kept: CuPy's memory objects call it until they are gone.
    _function = _function or _cupy.cuda.PythonFunctionAllocator(_malloc, _free)
    _cupy.cuda.set_allocator(_function.malloc)


def disable():
    """Gives CuPy its default pool back. Arrays of before keep their memory."""
    _cupy.cuda.set_allocator(_cupy.get_default_memory_pool().malloc)
