"""PyTorch on our memory.

`enable()` makes the shared runtime PyTorch's allocator. `pool()` gives a `torch.cuda.MemPool` whose segments come from a runtime with a limit and
a log of its own, while PyTorch sub-allocates them and keeps its statistics.
"""

import ctypes as _ctypes
import os as _os
import warnings as _warnings

import torch as _torch

from . import _captures, _native
from ._native import TORCH_GLOBAL as _GLOBAL

# PyTorch calls the functions of an allocator until the process ends, also after its Python object is gone.
_kept = []
_enabled = None
_DEVICES = 16


def _allocator(allocate, free):
    if not hasattr(_torch._C, "_cuda_customAllocator"):
        raise RuntimeError("this PyTorch was built without CUDA, so it has no allocator to replace")
    allocator = _torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, allocate, free)
    _kept.append(allocator)
    return allocator


def _address(name):
    return _ctypes.cast(getattr(_ctypes.CDLL(_native.__file__), name), _ctypes.c_void_p).value


# The functions that PyTorch calls beside allocate and free, by the method that sets each.
_CALLBACKS = {
    "set_record_stream_fn": "xlogmem_torch_record_stream",
    "set_reset_fn": "xlogmem_torch_reset",
    "set_memory_fraction_fn": "xlogmem_torch_memory_fraction",
    "set_base_alloc_fn": "xlogmem_torch_base_alloc",
    "set_begin_allocate_to_pool": "xlogmem_torch_begin_pool",
    "set_end_allocate_to_pool_fn": "xlogmem_torch_end_pool",
    "set_release_pool": "xlogmem_torch_release_pool",
}


def enable(**options):
    """Makes the shared runtime of each device PyTorch's allocator. Call it before anything initialises CUDA in PyTorch.

    Options are those of `xlogmem.configure` and hold for every device: `limit="60GiB"`, `log="run-%d.xtrace"`. Beyond the limit PyTorch raises
    `torch.OutOfMemoryError`. Statistics (`torch.cuda.memory_allocated()` and the like) are answered by the runtime.
    """
    global _enabled
    if _enabled is not None:
        raise RuntimeError("xlogmem.torch.enable() was called before; an allocator cannot be replaced")
    if _torch.cuda.is_initialized():
        raise RuntimeError(
            "PyTorch has initialised CUDA, so its allocator cannot be replaced any more; call xlogmem.torch.enable() right after "
            "`import torch`, or use xlogmem.torch.pool()"
        )
    allocator = _allocator("xlogmem_torch_alloc", "xlogmem_torch_free")
    raw = allocator.allocator()
    missing = [name for name in _CALLBACKS if not hasattr(raw, name)]
    if missing:
        raise RuntimeError(f"PyTorch {_torch.__version__} has no {', '.join(missing)}; use xlogmem.torch.pool(), or PyTorch 2.6 or newer")
    _native.torch_prepare(_os.path.join(_os.path.dirname(_torch.__file__), "lib", "libc10_cuda.so"))
    if options:
        for device in range(_DEVICES):
            _native.configure(device, **options)
    for name, function in _CALLBACKS.items():
        getattr(raw, name)(_address(function))
    _torch.cuda.memory.change_current_allocator(allocator)
    _enabled = allocator
    _patch()


def is_enabled():
    """Whether the shared runtime is PyTorch's allocator."""
    return _enabled is not None


_ZERO = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}


def _nested(counts):
    return {"all": dict(counts), "small_pool": dict(_ZERO), "large_pool": dict(_ZERO)}


def _memory_stats(device):
    """The dictionary of `torch._C._cuda_memoryStats`. Blocks are not divided into small and large ones."""
    counts = _native.torch_statistics(_GLOBAL, int(device)) or {}
    figure = lambda name: _nested(counts.get(name, _ZERO))
    return {
        "allocation": figure("allocation"),
        "active": figure("allocation"),
        "allocated_bytes": figure("allocated_bytes"),
        "active_bytes": figure("allocated_bytes"),
        "requested_bytes": figure("requested_bytes"),
        "reserved_bytes": figure("reserved_bytes"),
        "segment": _nested(_ZERO),
        "inactive_split": _nested(_ZERO),
        "inactive_split_bytes": _nested(_ZERO),
        "oversize_allocations": dict(_ZERO),
        "oversize_segments": dict(_ZERO),
        "max_split_size": -1,
        "num_alloc_retries": 0,
        "num_ooms": counts.get("num_ooms", 0),
        "num_sync_all_streams": 0,
        "num_device_alloc": 0,
        "num_device_free": 0,
    }


def _memory_fraction(device):
    runtime = _native.shared(int(device))
    return min(1.0, runtime.limit / _torch.cuda.get_device_properties(int(device)).total_memory)


def _refused(what, instead):
    def refuse(*_arguments, **_options):
        raise RuntimeError(f"{what} is not possible while xlogmem is PyTorch's allocator; {instead}")

    return refuse


_COMPILE = (
    "set torch._inductor.config.triton.cudagraph_trees = False for mode='reduce-overhead', or use xlogmem.torch.pool() instead of enable()"
)

# What PyTorch cannot ask of a plugged allocator, by the function of torch._C that is replaced.
_PATCHES = {
    "_cuda_memoryStats": _memory_stats,
    "_cuda_resetPeakMemoryStats": lambda device: _native.torch_reset_peaks(_GLOBAL, int(device)),
    "_cuda_resetAccumulatedMemoryStats": lambda device: _native.torch_reset_totals(_GLOBAL, int(device)),
    "_cuda_getMemoryFraction": _memory_fraction,
    "_cuda_memorySnapshot": _refused("a memory snapshot of PyTorch", "xlogmem.shared(device).snapshot() lists the live blocks"),
    "_cuda_record_memory_history": _refused("PyTorch's memory history", "pass log='run-%d.xtrace' to enable(), and see `xlogmem report`"),
    "_cuda_getCheckpointState": _refused("a checkpoint of a graph's memory", _COMPILE),
    "_cuda_setCheckpointPoolState": _refused("a checkpoint of a graph's memory", _COMPILE),
}


def _patch():
    for name, function in _PATCHES.items():
        if hasattr(_torch._C, name):
            setattr(_torch._C, name, function)
    _captures.patch(_torch.cuda.CUDAGraph, lambda: _torch.cuda.current_stream().cuda_stream)
    # cuDNN's benchmark mode asks for the largest cached block, which fails for every plugged allocator.
    _torch.backends.cudnn.benchmark = False
    switch = vars(type(_torch.backends.cudnn)).get("benchmark")
    if hasattr(switch, "setter"):
        switch.setter = _leave_benchmark_off


def _leave_benchmark_off(value):
    if value:
        _warnings.warn(
            "torch.backends.cudnn.benchmark stays off: it asks the allocator for its largest cached block, which PyTorch cannot ask of a "
            "plugged one; xlogmem.torch.pool() does not have this limit",
            stacklevel=3,
        )


def statistics(device=0):
    """The counts of the global allocator on a device, as `torch.cuda.memory_stats` groups them; `None` before its first use."""
    return _native.torch_statistics(_GLOBAL, device)


class Pool(getattr(_torch.cuda, "MemPool", object)):
    """A `torch.cuda.MemPool` whose segments come from a runtime with a limit and a log of its own."""

    def __init__(self, number, **arguments):
        self._number = number
        allocator = _allocator(f"xlogmem_pool_alloc_{number}", f"xlogmem_pool_free_{number}")
        super().__init__(allocator.allocator(), **arguments)

    def runtime(self, device=0):
        """The runtime of the segments on a device: its limit, its statistics, its snapshot."""
        return _native.torch_pool_runtime(self._number, device)

    def statistics(self, device=0):
        """The counts of segments on a device; `None` before its first use."""
        return _native.torch_statistics(self._number, device)

    @property
    def last_refusal(self):
        """Why a segment was last refused: the text behind `torch.OutOfMemoryError`."""
        return _native.torch_last_refusal(self._number)


def pool(*, use_on_oom=None, no_split=None, **options):
    """A pool for `torch.cuda.use_mem_pool`. Options are those of `xlogmem.open`: `limit="8GiB"`, `log="pool-%d.xtrace"`.

    The limit holds for the segments that PyTorch asks for, in multiples of 2 MiB. A process has at most 16 pools; they live as long as it does.
    """
    if not hasattr(_torch.cuda, "MemPool"):
        raise RuntimeError(f"PyTorch {_torch.__version__} has no torch.cuda.MemPool; pools need PyTorch 2.6 or newer")
    if _enabled is not None:
        raise RuntimeError("xlogmem is PyTorch's allocator already; set its limit by xlogmem.torch.enable(limit=...)")
    arguments = {"use_on_oom": use_on_oom, "no_split": no_split}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return Pool(_native.torch_new_pool(**options), **arguments)
