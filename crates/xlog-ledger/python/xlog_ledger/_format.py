"""The layout of a ledger file, its errors, and what is read of it. See docs/ledger-format.md."""

import os
import re
import struct

UNIT = 256
MAX_UNITS = 0xFFFFFFFF

_MAGIC = b"XLOGLDGR"
_VERSION = 2  # version 1 has no quotas
_HEADER_SIZE = 4096
_SLOT_SIZE = 128
_QUOTA_SIZE = 64
_QUOTA_GUARANTEED, _QUOTA_NAME = 8, 32
_FIXED = struct.Struct("<8sIIQIIII64s16x")  # the 120 bytes that the checksum covers
_AT_LIMIT, _AT_HOLDER, _AT_PRESSURE = 128, 192, 256
_SLOT_PEAK, _SLOT_PID, _SLOT_STARTED, _SLOT_NAME = 8, 16, 24, 32
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock; the process id must be 0
_IN_PLACE = {0xEF53, 0x58465342, 0x01021994, 0x858458F6, 0x794C7630}  # ext2 to ext4, XFS, tmpfs, ramfs, overlayfs


class LedgerError(Exception):
    """Something about the ledger; the message names the file and what to do."""


class Full(LedgerError):
    """The bytes do not fit. Nothing was counted."""

    def __init__(self, path, requested, available, limit, of="available"):
        super().__init__(f"{requested} bytes do not fit: {available} of {limit} {of} ({path})")
        self.requested, self.available, self.limit = requested, available, limit


class OverQuota(Full):
    """The bytes do not fit into the quota of this process. Nothing was counted. `limit` is the quota."""

    def __init__(self, path, requested, available, limit):
        super().__init__(path, requested, available, limit, "left of the quota of this process")


class NoQuotas(LedgerError):
    """The ledger is of version 1, which has no quotas, and processes are on it."""

    def __init__(self, path):
        super().__init__(
            f"{path}: format version 1 has no quotas; it is upgraded when the processes that use it have ended"
        )


class _Upgraded(Exception):
    """The file was upgraded while it was opened."""


class Busy(LedgerError):
    """The file lock was not free within the deadline. Nothing was counted."""

    def __init__(self, path, pid):
        holder = f"process {pid}" if pid else "an unknown process"
        super().__init__(f"{path}: file lock held by {holder}; see whether that process is stopped")
        self.pid = pid


def _checksum(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def _units(count):
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"{count!r} bytes is not accepted; expected an int of 0 or more")
    return -(-count // UNIT)


def _limit_word(units):
    return units | (units ^ MAX_UNITS) << 32


def _quota_units(raw):
    """The units of a stored quota; None if there is none, ValueError if it is damaged."""
    units = raw & MAX_UNITS
    if raw and raw != _limit_word(units):
        raise ValueError(f"{raw:016x} is no quota")
    return units if raw else None


def _file_size(version, slots):
    return _HEADER_SIZE + slots * (_SLOT_SIZE if version == 1 else _SLOT_SIZE + _QUOTA_SIZE)


def _fixed_part(key, slots):
    size = _file_size(_VERSION, slots)
    fixed = _FIXED.pack(
        _MAGIC, _VERSION, _HEADER_SIZE, size, slots, _SLOT_SIZE, UNIT, len(key), key.encode()
    )
    return fixed + struct.pack("<Q", _checksum(fixed))


def _new_file(key, slots, limit_units):
    head = _fixed_part(key, slots) + struct.pack("<Q", _limit_word(limit_units))
    return head.ljust(_file_size(_VERSION, slots), b"\0")


def _check_header(path, head, size):
    """The device key, the number of slots and the version of a file, or what is wrong with it."""
    remove = "stop the processes that use it, then remove it"
    if size < _HEADER_SIZE or len(head) < _AT_LIMIT + 8:
        raise LedgerError(f"{path}: truncated, {size} bytes; {remove}")
    magic, version, header_size, file_size, slots, slot_size, unit, length, key = _FIXED.unpack(head[:120])
    if magic != _MAGIC:
        raise LedgerError(f"{path}: not a valid ledger (it does not begin with XLOGLDGR); {remove}")
    if version > _VERSION:
        raise LedgerError(f"{path}: format version {version}, this client knows {_VERSION}; update it")
    (checksum,) = struct.unpack("<Q", head[120:128])
    sizes = (header_size, slot_size, unit) == (_HEADER_SIZE, _SLOT_SIZE, UNIT) and version > 0
    if checksum != _checksum(head[:120]) or not sizes or not 1 <= slots <= 4096 or length > 64:
        raise LedgerError(f"{path}: not a valid ledger (damaged header); {remove}")
    # A file of version 1 with the size of version 2: its upgrade was interrupted.
    if file_size != _file_size(version, slots) or size not in (file_size, _file_size(_VERSION, slots)):
        raise LedgerError(f"{path}: {size} bytes of {file_size}; {remove}")
    return key[:length].decode("ascii", "replace"), slots, version


def _read_header(path, fd):
    """What `_check_header` says of an open file. Another process may upgrade it meanwhile, so an error counts only if a second look sees the same."""
    seen = None
    while True:
        # An upgrade grows the file before it replaces the header, so the size is read last.
        head = os.pread(fd, _HEADER_SIZE, 0)
        now = (head[:128], os.fstat(fd).st_size)
        try:
            return _check_header(path, head, now[1])
        except LedgerError:
            if now == seen:
                raise
            seen = now


def _name_of(raw):
    """A stored name as it may be printed: up to the first zero, without what could steer a terminal."""
    text = bytes(raw).split(b"\0")[0].decode("utf-8", "replace")
    return "".join("?" if ord(letter) < 32 or 127 <= ord(letter) < 160 else letter for letter in text)


class Quota:
    """What one process may use of a device: `limit` (bytes, None for no limit of its own), `guaranteed` bytes that
    others may not take, and a `name` that is shown beside the process."""

    def __init__(self, limit=None, guaranteed=0, name=None):
        for what, count in (("quota", limit or 0), ("guaranteed share", guaranteed)):
            if not isinstance(count, int) or not 0 <= count // UNIT <= MAX_UNITS:
                raise ValueError(f"{what} {count!r} is not accepted; expected 0 to {MAX_UNITS * UNIT} bytes")
        if limit is not None and guaranteed > limit:
            raise ValueError(f"guaranteed share {guaranteed} is not accepted; expected at most the quota, {limit} bytes")
        self.limit, self.guaranteed, self.name = limit, guaranteed, name

    def __eq__(self, other):
        return isinstance(other, Quota) and self._fields() == other._fields()

    def __repr__(self):
        return f"Quota(limit={self.limit}, guaranteed={self.guaranteed}, name={self.name!r})"

    def _fields(self):
        return self.limit, self.guaranteed, self.name

    def _name_bytes(self):
        return (self.name or "").encode()[:31].decode("utf-8", "ignore").encode().ljust(32, b"\0")


class Slot:
    """A process on a ledger, in bytes, as `slots` read it."""

    def __init__(self, index, pid, started, name, alive, word, peak, quota):
        self.index, self.pid, self.started, self.name, self.alive = index, pid, started, name, alive
        self.used, self.granted, self.peak = (word & MAX_UNITS) * UNIT, (word >> 32) * UNIT, peak * UNIT
        self.quota = quota

    def __repr__(self):
        return f"Slot(pid={self.pid}, name={self.name!r}, used={self.used}, quota={self.quota})"


def _slots_of(data, slots, version, alive):
    found = []
    for index in range(slots):
        at = _HEADER_SIZE + index * _SLOT_SIZE
        word, peak, pid, started = struct.unpack_from("<QQQQ", data, at)
        if not word and not pid:
            continue
        lives = alive(index)
        if not word and not lives:
            continue
        quota = Quota()
        if version > 1:
            try:
                quota = _quota_of(data, _HEADER_SIZE + slots * _SLOT_SIZE + index * _QUOTA_SIZE)
            except ValueError:
                pass  # shown as missing
        name = _name_of(data[at + _SLOT_NAME : at + _SLOT_NAME + 32])
        found.append(Slot(index, pid & MAX_UNITS, started, name, lives, word, peak, quota))
    return found


def _quota_of(data, at):
    limit, guaranteed = (_quota_units(raw) for raw in struct.unpack_from("<QQ", data, at))
    quota = Quota()
    quota.limit = None if limit is None else limit * UNIT
    quota.guaranteed = (guaranteed or 0) * UNIT
    quota.name = _name_of(data[at + _QUOTA_NAME : at + _QUOTA_NAME + 32]) or None
    return quota
