"""The exceptions. Each has the values of the error as fields."""


class XlogError(Exception):
    """An operation of the runtime failed."""

    def __init__(self, text, **fields):
        super().__init__(text)
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self):
        # The fields survive a process boundary.
        return _restored, (type(self), self.args[0], self.__dict__)


def _restored(kind, text, fields):
    return kind(text, **fields)


class OutOfBudget(XlogError, MemoryError):
    """The request does not fit the limit. Fields: requested, remaining, report."""


class OutOfMemory(XlogError, MemoryError):
    """The device, the ledger or a cap has too little memory. Fields: requested, detail, report."""


class BadDeviceSpec(XlogError, ValueError):
    """The text names no device. Fields: spec, reason."""


class DeviceUnavailable(XlogError, RuntimeError):
    """The device is well named but cannot be opened. Field: spec."""


class BadSetting(XlogError, ValueError):
    """A setting has a value that is not accepted. Fields: name, value, reason, accepted."""


class InvalidRequest(XlogError, ValueError):
    """A value is not accepted. Fields: value, accepted."""


class LogInUse(XlogError, OSError):
    """The log file has a writer. Field: path."""


class StreamCapacity(XlogError, RuntimeError):
    """As many streams are leased as the runtime allows. Field: max."""


class StreamMisuse(XlogError, RuntimeError):
    """A stream was used in a way that cannot be ordered."""


class UseAfterFree(XlogError, RuntimeError):
    """Not the live block at its address. Field: generation."""


class OutOfBounds(XlogError, RuntimeError):
    """Bytes outside a block were written. Field: generation."""


class LedgerError(XlogError, RuntimeError):
    """The ledger that processes share could not be asked."""


class DriverError(XlogError, RuntimeError):
    """A driver call failed, or a race was detected on the simulated device."""
