"""Takes part in a device's ledger from Python, by the file format alone (docs/ledger-format.md).

Standard library only; 64-bit little-endian Linux, CPython 3.9 or newer.

    with xlog_ledger.Ledger("/run/user/1000/xlog/GPU-....ledger") as ledger:
        ledger.take(32 << 20)   # before the memory is taken from the device
        ledger.give(32 << 20)   # after it was returned

Python cannot compare-and-swap in a mapping. This client therefore never holds an unused grant: the format says that
a word without one is written by nobody but its owner while the owner lives. A plain store of eight aligned bytes is
then enough, and a mutex keeps the threads of the process apart. Every take asks for the file lock; no give does.
For the same reason it cannot take away what others were granted and do not use: where that is in its way it sets
the pressure word, on which owners hand it back at their next call, and waits for up to `patience` seconds.
"""

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import threading
import time

UNIT = 256
MAX_UNITS = 0xFFFFFFFF

_MAGIC = b"XLOGLDGR"
_VERSION = 1
_HEADER_SIZE = 4096
_SLOT_SIZE = 128
_FIXED = struct.Struct("<8sIIQIIII64s16x")  # the 120 bytes that the checksum covers
_AT_LIMIT, _AT_HOLDER, _AT_PRESSURE = 128, 192, 256
_SLOT_PEAK, _SLOT_PID, _SLOT_STARTED, _SLOT_NAME = 8, 16, 24, 32
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock; the process id must be 0


class LedgerError(Exception):
    """Something about the ledger; the message names the file and what to do."""


class Full(LedgerError):
    """The bytes do not fit. Nothing was counted."""

    def __init__(self, path, requested, available, limit):
        super().__init__(f"{requested} bytes do not fit: {available} of {limit} available ({path})")
        self.requested, self.available, self.limit = requested, available, limit


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


def _new_file(key, slots, limit_units):
    size = _HEADER_SIZE + slots * _SLOT_SIZE
    fixed = _FIXED.pack(
        _MAGIC, _VERSION, _HEADER_SIZE, size, slots, _SLOT_SIZE, UNIT, len(key), key.encode()
    )
    head = fixed + struct.pack("<QQ", _checksum(fixed), _limit_word(limit_units))
    return head.ljust(size, b"\0")


def _check_header(path, head, size):
    """The device key and the number of slots of a file, or what is wrong with it."""
    remove = "stop the processes that use it, then remove it"
    if size < _HEADER_SIZE or len(head) < _AT_LIMIT + 8:
        raise LedgerError(f"{path}: truncated, {size} bytes; {remove}")
    magic, version, header_size, file_size, slots, slot_size, unit, length, key = _FIXED.unpack(head[:120])
    if magic != _MAGIC:
        raise LedgerError(f"{path}: not a valid ledger (it does not begin with XLOGLDGR); {remove}")
    if version > _VERSION:
        raise LedgerError(f"{path}: format version {version}, this client knows {_VERSION}; update it")
    (checksum,) = struct.unpack("<Q", head[120:128])
    sizes = (version, header_size, slot_size, unit) == (_VERSION, _HEADER_SIZE, _SLOT_SIZE, UNIT)
    if checksum != _checksum(head[:120]) or not sizes or not 1 <= slots <= 4096 or length > 64:
        raise LedgerError(f"{path}: not a valid ledger (damaged header); {remove}")
    if file_size != _HEADER_SIZE + slots * _SLOT_SIZE or size != file_size:
        raise LedgerError(f"{path}: {size} bytes of {file_size}; {remove}")
    return key[:length].decode("ascii", "replace"), slots


class Ledger:
    """One opening of a ledger file, with a slot of its own. Close it, or use it in a `with` statement."""

    def __init__(self, path, *, limit=None, slots=256, deadline=2.0, patience=0.1, shared=False, name=None):
        """Joins the ledger at `path` (DIRECTORY/KEY.ledger).

        limit: bytes; creates the file if it is missing. The limit of an existing file rules.
        deadline: seconds for which the file lock is tried.
        patience: seconds for which a request waits for unused grants of others.
        shared: the file belongs to a group (mode 0660) and not to this user alone (0600).
        """
        self.path = os.path.abspath(path)
        self._deadline, self._patience = deadline, patience
        self._gate = threading.Lock()  # one thread at a time asks for the file lock
        self._mutex = threading.Lock()  # for the own word, never held over a wait
        self._opener = os.getpid()
        self._fd = -1
        self._slot = None
        directory, base = os.path.split(self.path)
        key = base[: -len(".ledger")] if base.endswith(".ledger") else ""
        if not _KEY.match(key):
            raise ValueError(f"{path!r} is not accepted; expected DIRECTORY/KEY.ledger")
        if limit is not None and not 1 <= limit // UNIT <= MAX_UNITS:
            raise ValueError(f"limit {limit} is not accepted; expected {UNIT} to {MAX_UNITS * UNIT} bytes")
        if not 1 <= slots <= 4096:
            raise ValueError(f"slots {slots} is not accepted; expected 1 to 4096")
        try:
            self._open(directory, key, limit, slots, shared)
            self._map = mmap.mmap(self._fd, _HEADER_SIZE + self._slots * _SLOT_SIZE)
            self._words = memoryview(self._map).cast("Q")
            self._limit()
            with self._file_lock():
                self._claim(name)
        except BaseException:
            self._release()
            raise

    def _open(self, directory, key, limit, slots, shared):
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for _ in range(16):
            try:
                self._fd = os.open(self.path, flags)
                break
            except FileNotFoundError:
                if limit is None:
                    raise LedgerError(f"{self.path}: no such ledger; give a limit to create it") from None
                self._create(directory, key, limit, slots, shared)
        else:
            raise LedgerError(f"{self.path}: removed as often as it was created")
        facts = os.fstat(self._fd)
        if not stat.S_ISREG(facts.st_mode):
            raise LedgerError(f"{self.path}: is not a regular file; remove it or choose another directory")
        if not shared and facts.st_uid != os.geteuid():
            raise LedgerError(f"{self.path}: belongs to user {facts.st_uid}, expected {os.geteuid()}")
        if facts.st_mode & (0o002 if shared else 0o022):
            raise LedgerError(f"{self.path}: mode {facts.st_mode & 0o7777:04o} lets others write; use chmod")
        found, self._slots = _check_header(self.path, os.pread(self._fd, _HEADER_SIZE, 0), facts.st_size)
        if found != key:
            raise LedgerError(f"{self.path}: is the ledger of device {found!r}, expected {key!r}; remove it")

    def _create(self, directory, key, limit, slots, shared):
        """Whole or not at all: written under another name, then linked, which never replaces."""
        draft = os.path.join(directory, f".{key}.ledger.{os.getpid()}.{time.time_ns():x}.tmp")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, 0o660 if shared else 0o600)
                file.write(_new_file(key, slots, limit // UNIT))
            try:
                os.link(draft, self.path)
            except FileExistsError:
                pass
        finally:
            os.unlink(draft)

    # Locks: one byte each, of this open file description.

    def _set_lock(self, kind, offset):
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))

    def _try_lock(self, offset):
        try:
            self._set_lock(fcntl.F_WRLCK, offset)
            return True
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise

    def _file_lock(self):
        return _FileLock(self)

    # Words. An index is an offset over eight.

    def _word_at(self, slot):
        return (_HEADER_SIZE + slot * _SLOT_SIZE) // 8

    def _limit(self):
        raw = self._words[_AT_LIMIT // 8]
        units = raw & MAX_UNITS
        if units == 0 or raw != _limit_word(units):
            raise LedgerError(f"{self.path}: not a valid ledger (limit word {raw:016x} is no limit)")
        return units

    def _others(self):
        """Units that the other slots hold, and how many of these are granted and not used."""
        total = granted = 0
        for slot in range(self._slots):
            word = self._words[self._word_at(slot)]
            if word and slot != self._slot:
                total += (word & MAX_UNITS) + (word >> 32)
                granted += word >> 32
        return total, granted

    def _clear(self, slot):
        at = self._word_at(slot)
        self._words[at] = 0
        for index in range(at + 1, at + 8):
            self._words[index] = 0

    def _claim(self, name):
        for slot in range(self._slots):
            if not self._try_lock(_HEADER_SIZE + slot * _SLOT_SIZE):
                continue
            self._clear(slot)
            at = _HEADER_SIZE + slot * _SLOT_SIZE
            text = (name or "python").encode()[:31].ljust(32, b"\0")
            self._map[at + _SLOT_NAME : at + _SLOT_NAME + 32] = text
            self._words[(at + _SLOT_STARTED) // 8] = time.time_ns()
            self._words[(at + _SLOT_PID) // 8] = os.getpid()
            self._slot = slot
            return
        raise LedgerError(f"{self.path}: all {self._slots} slots are in use")

    def _reclaim(self):
        """Empties the slots of the dead: those whose lock can be had. Under the file lock."""
        for slot in range(self._slots):
            at = _HEADER_SIZE + slot * _SLOT_SIZE
            if slot != self._slot and self._words[at // 8] and self._try_lock(at):
                self._clear(slot)
                self._set_lock(fcntl.F_UNLCK, at)

    def _check(self):
        if self._slot is None:
            raise LedgerError(f"{self.path}: this ledger is closed")
        if os.getpid() != self._opener:
            raise LedgerError(f"this ledger belongs to process {self._opener}, which forked; open one in the child")

    # What users call.

    def take(self, count):
        """Counts `count` bytes as used, or raises Full or Busy and counts nothing."""
        units = _units(count)
        patience = None
        with self._gate:
            self._check()
            while True:
                with self._file_lock():
                    limit = self._limit()
                    if self._grow(units, limit, self._others()[0]):
                        return
                    self._reclaim()
                    total, granted = self._others()
                    if self._grow(units, limit, total):
                        return
                    self._words[_AT_PRESSURE // 8] = 1
                    available = max(limit - total - self._words[self._word_at(self._slot)], 0)
                now = time.monotonic()
                patience = now + self._patience if patience is None else patience
                if units > available + granted or now >= patience:
                    raise Full(self.path, count, available * UNIT, limit * UNIT)
                time.sleep(0.0005)

    def _grow(self, units, limit, others):
        """Takes `units` into use if they fit beside the others. Under the file lock."""
        own = self._word_at(self._slot)
        with self._mutex:
            used = self._words[own] + units
            if used + others > limit:
                return False
            self._words[own] = used
        peak = own + _SLOT_PEAK // 8
        self._words[peak] = max(self._words[peak], used)
        if limit - others - used >= limit // 8:
            self._words[_AT_PRESSURE // 8] = 0
        return True

    def give(self, count):
        """Counts `count` bytes as no longer used. Takes no lock."""
        units = _units(count)
        with self._mutex:
            self._check()
            own = self._word_at(self._slot)
            used = self._words[own]
            if units > used:
                raise ValueError(f"{count} bytes given back of {used * UNIT} in use; give what was taken, once")
            self._words[own] = used - units

    @property
    def used(self):
        """Bytes this opener uses."""
        with self._mutex:
            self._check()
            return self._words[self._word_at(self._slot)] * UNIT

    @property
    def limit(self):
        """The limit of the device in bytes."""
        with self._mutex:
            self._check()
            return self._limit() * UNIT

    def hold_file_lock(self):
        """Holds the file lock in a `with` statement, as a process does that is stopped in the middle. For tests."""
        self._check()
        return self._file_lock()

    def close(self):
        """Gives everything back. In a forked child it only lets go of the file."""
        with self._gate, self._mutex:
            if self._slot is not None and os.getpid() == self._opener:
                self._clear(self._slot)
                self._set_lock(fcntl.F_UNLCK, _HEADER_SIZE + self._slot * _SLOT_SIZE)
            self._release()

    def _release(self):
        self._slot = None
        words, self._words = getattr(self, "_words", None), None
        if words is not None:
            words.release()
        if getattr(self, "_map", None) is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _FileLock:
    def __init__(self, ledger):
        self._ledger = ledger

    def __enter__(self):
        ledger = self._ledger
        end = time.monotonic() + ledger._deadline
        pause = 0.00002
        while not ledger._try_lock(_AT_HOLDER):
            if time.monotonic() >= end:
                raise Busy(ledger.path, ledger._words[_AT_HOLDER // 8] >> 32)
            time.sleep(pause)
            pause = min(pause * 2, 0.002)
        try:
            slot = 0 if ledger._slot is None else ledger._slot + 1
            ledger._words[_AT_HOLDER // 8] = os.getpid() << 32 | slot
            facts = os.fstat(ledger._fd)
            if facts.st_nlink == 0 or facts.st_size != _HEADER_SIZE + ledger._slots * _SLOT_SIZE:
                raise LedgerError(f"{ledger.path}: was removed or resized while in use; restart its users")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._ledger._words[_AT_HOLDER // 8] = 0
        self._ledger._set_lock(fcntl.F_UNLCK, _AT_HOLDER)
