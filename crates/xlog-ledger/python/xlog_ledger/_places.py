"""Where the ledgers of a user are, and the claims that keep one file per device."""

import ctypes
import fcntl
import os
import pwd
import stat
import struct

from ._format import _FLOCK, _IN_PLACE, _checksum


def default_directory():
    """The directory of this user's ledgers: the same in every kind of login, whatever the environment says."""
    user = os.geteuid()
    try:
        home = pwd.getpwuid(user).pw_dir
        facts = os.stat(home)
        own = os.path.isabs(home) and stat.S_ISDIR(facts.st_mode) and facts.st_uid == user
        if own and os.access(home, os.W_OK | os.X_OK, effective_ids=True) and _file_system(home) in _IN_PLACE:
            return os.path.join(home, ".local/state/xlog/ledger")
    except (KeyError, OSError):
        pass
    return f"/tmp/xlog-ledger-{user}"


def default_path(key):
    """The ledger of a device, by its key (a GPU's UUID), in the default directory."""
    return os.path.join(default_directory(), f"{key}.ledger")


def _file_system(path):
    """The kind of a file system, as statfs(2) names it in its first word."""
    facts = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), facts) != 0:
        raise OSError(ctypes.get_errno(), "statfs failed", path)
    return struct.unpack_from("@l", facts)[0]


def _inode_at(path):
    """Device and number of what a path names; None where it names nothing that can be seen."""
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


class _Claims:
    """Shared locks on directories that say in which file a living process counts an account."""

    def __init__(self, directory, base, key):
        self._directory, self._anchors = directory, []
        path = os.path.join(os.path.realpath(directory), base)
        names = [os.fsencode(path)]
        if directory == default_directory():
            names.append(f"default {os.geteuid()} {key}".encode())
        self._accounts = [_checksum(name) >> 33 << 32 for name in names]
        self.reopen()

    def reopen(self):
        self.close()
        for place in (self._directory, "/"):
            try:
                anchor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError:
                if place == "/":
                    continue
                raise
            self._anchors.append(anchor)
            if place != "/":
                try:
                    fcntl.flock(anchor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # systemd-tmpfiles then passes the directory over
                except OSError:
                    pass

    def _each(self):
        return ((anchor, account) for anchor in self._anchors for account in self._accounts)

    def hold(self, inode):
        for anchor, account in self._each():
            at = account | _inode_offset(inode)
            fcntl.fcntl(anchor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, at, 1, 0))

    def release(self, inode):
        for anchor, account in self._each():
            at = account | _inode_offset(inode)
            fcntl.fcntl(anchor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, at, 1, 0))

    def held_for_another(self, inode):
        """Whether a living process claims an account for another file than this one; for any file, without one."""
        end = 1 << 32
        own = None if inode is None else _inode_offset(inode)
        ranges = [(0, end)] if own is None else [(0, own), (own + 1, end)]
        return any(
            self._is_locked(anchor, account + first, last - first)
            for anchor, account in self._each()
            for first, last in ranges
            if last > first
        )

    @staticmethod
    def _is_locked(anchor, at, length):
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, length, 0)
        return _FLOCK.unpack(fcntl.fcntl(anchor, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK

    def close(self):
        while self._anchors:
            os.close(self._anchors.pop())


def _inode_offset(inode):
    return _checksum(struct.pack("<QQ", *inode)) >> 32
