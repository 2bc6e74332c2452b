//! The default directory of a user's ledgers, identical in every kind of login.
//!
//! It depends on the effective user and the machine, never on the environment, which differs between a login, `sudo`, a batch job and a
//! service. The session's runtime directory vanishes at logout, and shared memory with the user's last session, so neither is used. If two
//! processes still get different default directories (a service without a home directory), `claim` prevents separate accounts.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::mapping::effective_user;

/// The path below the home directory.
const STATE: &str = ".local/state/xlog/ledger";

/// Local file systems that overwrite a written page in place: ext2 to ext4, XFS, tmpfs, ramfs, overlayfs. Others may be shared between
/// machines, lack locks, or need new space to rewrite a page.
const IN_PLACE: [i64; 5] = [0xef53, 0x5846_5342, 0x0102_1994, 0x8584_58f6, 0x794c_7630];

/// File systems shared between machines, where one machine does not see another's writes to a mapping in time.
const NETWORK: [(i64, &str); 9] = [
    (0x6969, "NFS"),
    (0x517b, "SMB"),
    (0xfe53_4d42, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0x5346_414f, "AFS"),
    (0x00c3_6400, "Ceph"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
];

/// The network file system of an open file; `None` for a local or unknown one.
pub(super) fn network_of(file: &File) -> io::Result<Option<&'static str>> {
    // SAFETY: all-zero is a valid value of plain integers.
    let mut facts: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open as long as `file` is borrowed; the kernel writes to `facts`, which is ours.
    if unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut facts) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(network_name(kind_in(&facts)))
}

fn network_name(kind: i64) -> Option<&'static str> {
    NETWORK.iter().find(|(known, _)| *known == kind).map(|(_, name)| *name)
}

/// The magic number of a file system: 32 bits whose sign is meaningless.
#[allow(clippy::unnecessary_cast, reason = "the type of f_type differs between C libraries")]
fn kind_in(facts: &libc::statfs) -> i64 {
    facts.f_type as i64 & 0xffff_ffff
}

/// The user's state directory if its file system is suitable, else one in `/tmp` named for the user.
pub(super) fn default_directory() -> PathBuf {
    let user = effective_user();
    match home_of(user).filter(|home| is_suitable(home, user)) {
        Some(home) => home.join(STATE),
        None => PathBuf::from(format!("/tmp/xlog-ledger-{user}")),
    }
}

/// The home directory in the user database; `None` for a user without one.
fn home_of(user: u32) -> Option<PathBuf> {
    let mut buffer = vec![0u8; 1024];
    loop {
        // SAFETY: an all-zero passwd is a valid value of plain integers and null pointers.
        let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        let (text, length) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: the entry, the buffer of that length and the result are ours for the whole call.
        let status =
            unsafe { libc::getpwuid_r(user, &raw mut entry, text, length, &raw mut found) };
        match status {
            libc::EINTR => {}
            libc::ERANGE if length < 1 << 20 => buffer.resize(length * 2, 0),
            0 if !found.is_null() && !entry.pw_dir.is_null() => {
                // SAFETY: the call has set the field to a terminated string inside `buffer`, which is still there.
                let home = unsafe { CStr::from_ptr(entry.pw_dir) };
                let home = PathBuf::from(OsStr::from_bytes(home.to_bytes()));
                return Some(home).filter(|home| home.is_absolute());
            }
            _ => return None,
        }
    }
}

/// True for a writable directory of this user on a file system of [`IN_PLACE`].
fn is_suitable(home: &Path, user: u32) -> bool {
    let is_own = std::fs::metadata(home).is_ok_and(|facts| facts.is_dir() && facts.uid() == user);
    let Ok(name) = CString::new(home.as_os_str().as_bytes()) else { return false };
    let (mode, effective) = (libc::W_OK | libc::X_OK, libc::AT_EACCESS);
    // SAFETY: the name is a terminated string.
    let is_writable =
        || unsafe { libc::faccessat(libc::AT_FDCWD, name.as_ptr(), mode, effective) } == 0;
    let is_in_place = || {
        // SAFETY: all-zero is a valid value of plain integers.
        let mut facts: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: the name is a terminated string; the kernel writes to `facts`, which is ours.
        let status = unsafe { libc::statfs(name.as_ptr(), &raw mut facts) };
        status == 0 && IN_PLACE.contains(&kind_in(&facts))
    };
    is_own && is_writable() && is_in_place()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_that_is_not_the_users_own_local_directory_is_passed_over() {
        let user = effective_user();
        for home in ["/nonexistent", "/proc/self", "/proc/self/comm", "/sys"] {
            assert!(!is_suitable(Path::new(home), user), "{home}");
        }
        assert!(!is_suitable(&std::env::temp_dir(), user.wrapping_add(1)), "another user's");
        assert_eq!(home_of(u32::MAX - 7), None, "no such user");
    }
    #[test]
    fn file_systems_that_machines_share_are_known_and_never_the_default() {
        assert_eq!(network_name(0x6969), Some("NFS"));
        assert_eq!(network_name(0x0bd0_0bd0), Some("Lustre"));
        assert!(IN_PLACE.iter().all(|kind| network_name(*kind).is_none()));
        let local = File::open("/proc/self/comm").expect("a file of this machine");
        assert_eq!(network_of(&local).expect("statfs"), None);
    }
}
