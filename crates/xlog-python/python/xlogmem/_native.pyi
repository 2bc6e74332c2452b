from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self

__version__: str

Size = int | str

def open(
    device: str | None = None,
    *,
    limit: Size | None = None,
    reserve: Size | None = None,
    resource: str | None = None,
    ledger: str | None = None,
    log: str | PathLike[str] | None = None,
    stacks: str | None = None,
    guard: str | None = None,
    max_streams: int | None = None,
) -> Runtime:
    """Opens a device, `"cuda:N"`, `"sim"` or `"sim:SEED"`, and builds a runtime on it. `None` is what `XLOG_DEVICE` names, else `"cuda:0"`."""

def shared(device: int = 0) -> Runtime:
    """The runtime of a device that the whole process shares, also with the frameworks."""

def configure(
    device: int = 0,
    *,
    limit: Size | None = None,
    reserve: Size | None = None,
    resource: str | None = None,
    ledger: str | None = None,
    log: str | PathLike[str] | None = None,
    stacks: str | None = None,
    guard: str | None = None,
    max_streams: int | None = None,
) -> None:
    """Sets the configuration of the shared runtime of a device, before its first use. The rest is as the environment says."""

def last_oom() -> dict[str, Any] | None:
    """The report of this thread's last refusal, by any runtime."""

def refresh_limits() -> int:
    """Gives all runtimes of this process their limits of now, after its quota was changed; the number of runtimes."""

TORCH_GLOBAL: int

def torch_prepare(library: str) -> None: ...
def torch_new_pool(**options: Any) -> int: ...
def torch_statistics(pool: int, device: int) -> dict[str, Any] | None: ...
def torch_reset_peaks(pool: int, device: int) -> None: ...
def torch_reset_totals(pool: int, device: int) -> None: ...
def torch_last_capture() -> int: ...
def torch_abandon_capture(number: int) -> None: ...
def torch_last_refusal(pool: int) -> str | None: ...
def torch_pool_runtime(pool: int, device: int) -> Runtime: ...

class Runtime:
    """A device, its streams, its memory and its limit."""

    @property
    def limit(self) -> int: ...
    @limit.setter
    def limit(self, limit: Size) -> None: ...
    @property
    def device(self) -> str: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def default_stream(self) -> Stream: ...
    @property
    def remaining(self) -> int: ...
    @property
    def bytes_outstanding(self) -> int:
        """Bytes of live blocks, and of freed ones that work is pending on."""
    @property
    def physical_bytes(self) -> int | None:
        """Bytes that the runtime holds of the device, cached or not."""
    def allocate(self, nbytes: int, *, stream: Stream | None = None, tag: str | None = None) -> Buffer:
        """Allocates bytes without a type."""
    def empty(
        self, shape: Sequence[int], dtype: str = "uint8", *, stream: Stream | None = None, tag: str | None = None
    ) -> Buffer:
        """Allocates an array, whose contents are unspecified."""
    def from_array(self, array: Any) -> Buffer:
        """A buffer over an array of another library, by DLPack or the CUDA array interface."""
    def stream(self) -> Stream:
        """Leases a stream."""
    def scope(self, name: str, hard: Size, soft: Size | None = None) -> Scope:
        """A scope of the budget: at most `hard` bytes, of which `soft` are guaranteed."""
    def budget(self, limit: Size, name: str = "budget") -> Scope:
        """A scope with a limit alone."""
    def statistics(self) -> dict[str, Any] | None:
        """Counts of all blocks, and by tag, stream and kind of failure."""
    def snapshot(self) -> dict[str, Any]:
        """Everything about the runtime at this moment: limit, statistics, live blocks, scopes."""
    def last_oom(self) -> dict[str, Any] | None:
        """The report of the last refusal."""
    def log_on(self, path: str | PathLike[str]) -> None:
        """Logs every operation to a file from now on; its name ends in `.xtrace` or `.csv`."""
    def log_off(self) -> None:
        """Writes what is left of the log and closes it."""
    def trim(self) -> int:
        """Returns cached memory to the device; the number of bytes."""
    def reap(self) -> None:
        """Waits for every queued free."""
    def synchronize(self) -> None:
        """Waits for everything queued on the device."""
    def races(self) -> list[str]:
        """What the race detector of the simulated device found; always empty on a GPU."""
    def _set_capturing(self, stream: Stream, is_captured: bool) -> None: ...
    def _fail_next_wait(self) -> None: ...
    def _queue_fill(self, stream: Stream, buffer: Buffer, value: int) -> None: ...
    def _queue_fill_at(self, stream: Stream, ptr: int, nbytes: int, value: int) -> None: ...

class Stream:
    """A stream of a runtime: the default one, or a leased one that goes back when this object goes."""

    @property
    def id(self) -> int: ...
    @property
    def handle(self) -> int:
        """The `CUstream` as an int, for other libraries; on the simulated device the number of the stream."""
    def __cuda_stream__(self) -> list[int]: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...
    def wait_for(self, other: Stream) -> None:
        """Makes later work wait for everything queued on `other` so far."""
    def hold(self) -> Hold:
        """Holds the stream inside `with`: what is queued meanwhile runs afterwards."""

class Hold:
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> bool: ...

class Buffer:
    """Device memory of a runtime."""

    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def tag(self) -> str | None: ...
    @property
    def is_freed(self) -> bool: ...
    def copy_from(self, source: Any, *, stream: Stream | None = None) -> None:
        """Copies bytes of the host to the device. `source` has the buffer protocol and may be reused at once."""
    def to_bytes(self, *, stream: Stream | None = None) -> bytes:
        """The bytes, once everything that writes them has completed."""
    def fill(self, value: int) -> None:
        """Sets every byte."""
    def copy_from_device(self, source: Buffer, *, stream: Stream | None = None) -> None:
        """Copies another buffer of the same size on the device."""
    def record_use(self, stream: int) -> None:
        """Records that work queued on a stream of another library so far may use the buffer."""
    def free(self) -> None:
        """Frees the memory in stream order. Refused while another library has it."""
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __len__(self) -> int: ...

class Scope:
    """A part of a budget with limits of its own. Inside `with`, allocations of this thread count there."""

    @property
    def name(self) -> str: ...
    @property
    def used(self) -> int: ...
    @property
    def soft(self) -> int: ...
    @property
    def hard(self) -> int: ...
    def scope(self, name: str, hard: Size, soft: Size | None = None) -> Scope: ...
    def set_limits(self, hard: Size, soft: Size | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> bool: ...

class Tag:
    """A label: inside `with`, allocations of this thread have it in logs and statistics."""

    def __init__(self, name: str) -> None: ...
    @property
    def name(self) -> str: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> bool: ...

class Allocator:
    """Allocates memory of a device's shared runtime for a framework, by address."""

    def __init__(self, device: int = 0) -> None: ...
    @property
    def device(self) -> int: ...
    def malloc(self, nbytes: int, stream: int | None = None) -> int: ...
    def free(self, ptr: int, streams: Sequence[int] | None = None) -> None: ...
    def memory_info(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...
