"""Device memory with limits, logs and checks.

`open("cuda:0")` or `open("sim")` gives a runtime of your own. `xlogmem.torch`, `xlogmem.cupy`, `xlogmem.numba`, `xlogmem.rmm` and
`xlogmem.MemoryResource` put a framework on the runtime that the process shares for each device.
"""

import importlib as _importlib

from ._errors import (
    BadDeviceSpec,
    BadSetting,
    DeviceUnavailable,
    DriverError,
    InvalidRequest,
    LedgerError,
    LogInUse,
    OutOfBounds,
    OutOfBudget,
    OutOfMemory,
    StreamCapacity,
    StreamMisuse,
    UseAfterFree,
    XlogError,
)
from ._native import Buffer, Hold, Runtime, Scope, Stream, __version__, configure, last_oom, open, shared
from ._native import Tag as tag
from ._report import Report, report

__all__ = [
    "BadDeviceSpec",
    "BadSetting",
    "Buffer",
    "DeviceUnavailable",
    "DriverError",
    "Hold",
    "InvalidRequest",
    "LedgerError",
    "LogInUse",
    "MemoryResource",
    "OutOfBounds",
    "OutOfBudget",
    "OutOfMemory",
    "Report",
    "Runtime",
    "Scope",
    "Stream",
    "StreamCapacity",
    "StreamMisuse",
    "UseAfterFree",
    "XlogError",
    "cluster",
    "configure",
    "cupy",
    "dask",
    "last_oom",
    "numba",
    "open",
    "ray",
    "report",
    "rmm",
    "shared",
    "tag",
    "torch",
]

# Imported at first use: each needs its framework.
_MODULES = frozenset({"cluster", "cupy", "dask", "numba", "ray", "rmm", "torch"})


def __getattr__(name):
    if name in _MODULES:
        return _importlib.import_module(f".{name}", __name__)
    if name == "MemoryResource":
        return _importlib.import_module("._cuda_core", __name__).MemoryResource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
