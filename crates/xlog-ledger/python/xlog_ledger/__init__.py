"""Takes part in a device's ledger from Python, by the file format alone (docs/ledger-format.md).

Standard library only; 64-bit little-endian Linux, CPython 3.9 or newer.

    with xlog_ledger.Ledger(xlog_ledger.default_path("GPU-...")) as ledger:
        ledger.charge(32 << 20)    # before the memory is taken from the device
        ledger.release(32 << 20)   # after it was returned

Python cannot compare-and-swap in a mapping. This client therefore never holds an unused grant: the format says that
a word without one is written by its owner alone while the owner lives. A plain store of eight aligned bytes is
then enough, and a mutex keeps the threads of the process apart. Every charge asks for the file lock; no release does.
For the same reason it cannot take away what others were granted and do not use: where that is in its way it sets
the pressure word, on which owners hand it back at their next call, and waits for up to `patience` seconds.
"""

import atexit
import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
import weakref

from ._format import (
    _AT_HOLDER, _AT_LIMIT, _AT_PRESSURE, _FLOCK, _HEADER_SIZE, _KEY, _QUOTA_NAME, _QUOTA_SIZE, _SLOT_NAME, _SLOT_PEAK,
    _SLOT_PID, _SLOT_SIZE, _SLOT_STARTED, _VERSION, _file_size, _fixed_part, _limit_word, _new_file,
    _quota_of, _quota_units, _read_header, _slots_of, _units, _Upgraded,
    MAX_UNITS, UNIT, Busy, Full, LedgerError, NoQuotas, OverQuota, Quota, Slot,
)  # fmt: skip
from ._places import _Claims, _inode_at, default_directory, default_path

__all__ = [
    "MAX_UNITS", "UNIT", "Busy", "Full", "Ledger", "LedgerError", "NoQuotas", "OverQuota", "Quota", "Slot",
    "default_directory", "default_path", "read",
]  # fmt: skip

_open_ledgers = weakref.WeakSet()
_opening = threading.Lock()  # held while a ledger is opened and while the process forks


def _let_go_in_child():
    """A forked child would keep its parent's locks: it closes what holds them."""
    for ledger in list(_open_ledgers):
        ledger._release()
    _opening.release()


def _leave_all():
    """At the normal end of the process: a slot that stays behind would be shown as a dead process's."""
    for ledger in list(_open_ledgers):
        # A thread that still waits inside a call does not hold up the end.
        if ledger._gate.acquire(timeout=0.1):
            ledger._leave()


atexit.register(_leave_all)
os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_let_go_in_child)


def read(path):
    """The limit in bytes and the `Slot`s of a ledger file, read without taking part. Works on a file of any owner."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _, slots, version = _read_header(path, fd)
        data = os.pread(fd, _file_size(version, slots), 0)

        def alive(index):
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _HEADER_SIZE + index * _SLOT_SIZE, 1, 0)
            return _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK

        (limit,) = struct.unpack_from("<Q", data, _AT_LIMIT)
        return (limit & MAX_UNITS) * UNIT, _slots_of(data, slots, version, alive)
    finally:
        os.close(fd)


class Ledger:
    """One opening of a ledger file, with a slot of its own. Close it, or use it in a `with` statement."""

    def __init__(
        self, path, *, limit=None, slots=256, deadline=2.0, patience=0.1, shared=False, name=None, quota=None
    ):
        """Joins the ledger at `path` (DIRECTORY/KEY.ledger).

        limit: bytes; creates the file if it is missing. The limit of an existing file rules.
        deadline: seconds for which the file lock is tried.
        patience: seconds for which a request waits for unused grants of others.
        shared: the file belongs to a group (mode 0660) and not to this user alone (0600).
        quota: the Quota of this process.
        """
        self.path = os.path.abspath(path)
        self._deadline, self._patience = deadline, patience
        self._gate = threading.Lock()  # one thread at a time asks for the file lock
        self._mutex = threading.Lock()  # for the own word, never held over a wait
        self._opener = os.getpid()
        self._fd = -1
        self._claims = None
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
            for attempt in range(4):
                try:
                    with _opening:
                        _open_ledgers.add(self)
                        self._claims = _Claims(directory, base, key)
                        self._open(directory, key, limit, slots, shared)
                        self._map = self._mapped()
                        self._words = memoryview(self._map).cast("Q")
                    self._limit()
                    with self._file_lock():
                        if self._version == 1 and self._upgrade(key):
                            raise _Upgraded
                        self._claim(name)
                    break
                except _Upgraded:
                    self._release()
            else:
                raise LedgerError(f"{self.path}: upgraded while it was opened; try again")
            if quota is not None and quota != Quota():
                self.set_quota(quota)
        except BaseException:
            if self._slot is not None:
                self._leave()
            self._release()
            raise

    def _upgrade(self, key):
        """Upgrades a file of version 1 in place, if no living process is on it. Under the file lock."""
        for slot in range(self._slots):
            at = _HEADER_SIZE + slot * _SLOT_SIZE
            if not self._try_lock(at):
                return False
            self._set_lock(fcntl.F_UNLCK, at)
        try:
            os.posix_fallocate(self._fd, 0, _file_size(_VERSION, self._slots))
        except OSError:
            return False
        os.pwrite(self._fd, _fixed_part(key, self._slots), 0)
        return True

    def _open(self, directory, key, limit, slots, shared):
        """Opens or creates the file, and claims it: see "The claims" in docs/ledger-format.md."""
        displaced = False
        if limit is not None and directory == default_directory():
            os.makedirs(directory, 0o700, exist_ok=True)
            self._claims.reopen()
        for attempt in range(16):
            try:
                self._open_existing(key, shared)
            except FileNotFoundError:
                displaced = self._claims.held_for_another(None)
                if displaced:
                    time.sleep(0.0001 * attempt)
                elif limit is None:
                    raise LedgerError(f"{self.path}: no such ledger; give a limit to create it") from None
                else:
                    self._create(directory, key, limit, slots, shared)
                continue
            self._claims.hold(self._inode)
            displaced = self._claims.held_for_another(self._inode)
            if not displaced and _inode_at(self.path) == self._inode:
                return
            self._claims.release(self._inode)
            os.close(self._fd)
            self._fd = -1
            time.sleep(0.0001 * attempt)
        if displaced:
            raise LedgerError(
                f"{self.path}: the ledger that is in use by living processes is another file; move that file back, or end them:"
                f" grep -l {key}.ledger /proc/[0-9]*/maps names them"
            )
        raise LedgerError(f"{self.path}: removed as often as it was created")

    def _open_existing(self, key, shared):
        self._fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        facts = os.fstat(self._fd)
        self._inode = (facts.st_dev, facts.st_ino)
        if not stat.S_ISREG(facts.st_mode):
            raise LedgerError(f"{self.path}: is not a regular file; remove it or choose another directory")
        if not shared and facts.st_uid != os.geteuid():
            raise LedgerError(f"{self.path}: belongs to user {facts.st_uid}, expected {os.geteuid()}")
        if facts.st_mode & (0o002 if shared else 0o022):
            raise LedgerError(f"{self.path}: mode {facts.st_mode & 0o7777:04o} lets others write; use chmod")
        found, self._slots, self._version = _read_header(self.path, self._fd)
        if found != key:
            raise LedgerError(f"{self.path}: is the ledger of device {found!r}, expected {key!r}; remove it")
        if os.lseek(self._fd, 0, os.SEEK_HOLE) < facts.st_size:
            try:
                os.posix_fallocate(self._fd, 0, facts.st_size)
            except OSError as error:
                raise LedgerError(f"{self.path}: has holes that cannot be filled: {error}; free some space") from error

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

    def _mapped(self):
        """Maps the file through a descriptor of its own: a killed process's mapping may outlive it, and would keep its lock."""
        try:
            apart = os.open(f"/proc/thread-self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            apart = os.dup(self._fd)
        try:
            if not os.path.samestat(os.fstat(apart), os.fstat(self._fd)):
                raise LedgerError(f"{self.path}: its descriptor was closed by other code")
            return mmap.mmap(apart, _file_size(self._version, self._slots))
        finally:
            os.close(apart)

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
        """Units that the other slots hold or are guaranteed, and how many are granted and not used."""
        total = granted = 0
        for slot in range(self._slots):
            word = self._words[self._word_at(slot)]
            if slot != self._slot and (word or self._words[self._word_at(slot) + _SLOT_PID // 8]):
                total += max((word & MAX_UNITS) + (word >> 32), self._guaranteed(slot))
                granted += word >> 32
        return total, granted

    def _quota_at(self, slot):
        """The index of a slot's quota; None in a file of version 1."""
        if self._version == 1:
            return None
        return (_HEADER_SIZE + self._slots * _SLOT_SIZE + slot * _QUOTA_SIZE) // 8

    def _guaranteed(self, slot):
        """Units that are kept free for a slot; a damaged quota keeps nothing."""
        at = self._quota_at(slot)
        try:
            limit, units = (_quota_units(self._words[at + part]) for part in (0, 1)) if at else (None, None)
        except ValueError:
            return 0
        return min(units or 0, MAX_UNITS if limit is None else limit)

    def _own_quota(self):
        """The limit of the own slot in units."""
        at = self._quota_at(self._slot)
        try:
            units = _quota_units(self._words[at]) if at else None
        except ValueError as error:
            raise LedgerError(f"{self.path}: not a valid ledger (the quota of slot {self._slot}: {error})") from None
        return MAX_UNITS if units is None else units

    def _clear(self, slot):
        at = self._word_at(slot)
        self._words[at] = 0
        quota = self._quota_at(slot)
        if quota:
            for index in range(quota, quota + _QUOTA_SIZE // 8):
                self._words[index] = 0
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
            held = self._words[at // 8] or self._words[(at + _SLOT_PID) // 8]
            if slot != self._slot and held and self._try_lock(at):
                self._clear(slot)
                self._set_lock(fcntl.F_UNLCK, at)

    def _check(self):
        if os.getpid() != self._opener:
            raise LedgerError(f"this ledger belongs to process {self._opener}, which forked; open one in the child")
        if self._slot is None:
            raise LedgerError(f"{self.path}: this ledger is closed")

    # What users call.

    def charge(self, count):
        """Counts `count` bytes as used, or raises Full or Busy and counts nothing."""
        units = _units(count)
        patience = None
        with self._gate:
            self._check()
            while True:
                with self._file_lock():
                    limit, quota = self._limit(), self._own_quota()
                    left = max(quota - self._words[self._word_at(self._slot)], 0)
                    if units > left:
                        raise OverQuota(self.path, count, left * UNIT, quota * UNIT)
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
        # As others see it: a share that others still hold in part keeps the pressure up.
        if limit - others - max(used, self._guaranteed(self._slot)) >= limit // 8:
            self._words[_AT_PRESSURE // 8] = 0
        return True

    def release(self, count):
        """Counts `count` bytes as no longer used. Takes no lock."""
        units = _units(count)
        with self._mutex:
            self._check()
            own = self._word_at(self._slot)
            used = self._words[own]
            if units > used:
                raise ValueError(f"{count} bytes released of {used * UNIT} in use; release what was charged, once")
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

    @property
    def quota(self):
        """The Quota of this process."""
        with self._mutex:
            self._check()
            at = self._quota_at(self._slot)
            return Quota() if at is None else _quota_of(self._map, at * 8)

    def set_quota(self, quota, process=None):
        """Sets the quota of this process, or of another one: a `Slot` of `slots()`.

        It holds from the next request of that process."""
        with self._gate:
            self._check()
            with self._file_lock():
                slot = self._slot if process is None else process.index
                at = _HEADER_SIZE + slot * _SLOT_SIZE
                if process is not None:
                    _, _, pid, started = struct.unpack_from("<QQQQ", self._map, at)
                    if (pid & MAX_UNITS, started) != (process.pid, process.started) or not self._lives(slot):
                        raise LedgerError(f"{self.path}: process {process.pid} has left this ledger")
                index = self._quota_at(slot)
                if index is None:
                    raise NoQuotas(self.path)
                guaranteed = quota.guaranteed // UNIT
                if guaranteed:
                    self._reclaim()
                    others = sum(self._guaranteed(other) for other in range(self._slots) if other != slot)
                    available = max(self._limit() - others, 0)
                    if guaranteed > available:
                        raise LedgerError(
                            f"{quota.guaranteed} bytes cannot be guaranteed: {available * UNIT} of {self._limit() * UNIT}"
                            f" are not guaranteed to other processes ({self.path}); lower another share"
                        )
                name = index * 8 + _QUOTA_NAME
                self._map[name : name + 32] = quota._name_bytes()
                self._words[index + 1] = _limit_word(guaranteed) if guaranteed else 0
                self._words[index] = 0 if quota.limit is None else _limit_word(quota.limit // UNIT)
                own = self._words[self._word_at(self._slot)]
                if guaranteed and self._others()[0] + max(own, self._guaranteed(self._slot)) > self._limit():
                    self._words[_AT_PRESSURE // 8] = 1  # owners then keep no unused grant

    def _lives(self, slot):
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _HEADER_SIZE + slot * _SLOT_SIZE, 1, 0)
        locked = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK
        return slot == self._slot or locked

    def slots(self):
        """All processes of the ledger: a list of `Slot`."""
        with self._mutex:
            self._check()
            return _slots_of(self._map, self._slots, self._version, self._lives)

    def hold_file_lock(self):
        """Holds the file lock in a `with` statement, as a process does that is stopped in the middle. For tests."""
        self._check()
        return self._file_lock()

    def close(self):
        """Gives everything back. In a forked child it only lets go of the file."""
        with self._gate:
            self._leave()

    def _leave(self):
        with self._mutex:
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
        if self._claims is not None:
            self._claims.close()
            self._claims = None

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
            size = os.fstat(ledger._fd).st_size
            resized = size != _file_size(ledger._version, ledger._slots)
            if resized and size == _file_size(_VERSION, ledger._slots):
                # A file of version 1: another process has begun to upgrade it, and was killed or has completed that.
                if ledger._slot is None and ledger._words[1] & MAX_UNITS != 1:
                    raise _Upgraded
                resized = ledger._words[1] & MAX_UNITS != 1
            if resized or _inode_at(ledger.path) not in (ledger._inode, None):
                raise LedgerError(f"{ledger.path}: was replaced or resized while in use; restart its users")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._ledger._words[_AT_HOLDER // 8] = 0
        self._ledger._set_lock(fcntl.F_UNLCK, _AT_HOLDER)
