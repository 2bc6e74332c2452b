//! The preloaded library as a file.
//!
//! Children of the program may start long after the command has ended and still need the file. So it stays, one per
//! content. It is renamed into place complete, in a folder that only this user can write to.

use std::fs::{DirBuilder, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Error, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::process::geteuid;

/// The library; empty on platforms without it.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libxlog_preload.so"));

/// Its file name.
pub(super) const NAME: &str = "libxlog_preload.so";

/// Returns the path of the library and writes it if it is missing.
pub(super) fn install() -> Result<PathBuf, String> {
    if LIBRARY.is_empty() {
        let here = cfg!(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"));
        let reason = match here {
            true => {
                "this xlogmem was built without the library that exec preloads; build it from a checkout of its repository: \
                     cargo install --path crates/xlogmem"
            }
            false => "exec needs Linux on x86-64 with the GNU C library",
        };
        return Err(reason.to_owned());
    }
    let mut reasons = Vec::new();
    for parent in parents() {
        match install_in(&parent) {
            Ok(path) => return Ok(path),
            Err(error) => reasons.push(format!("{}: {error}", parent.display())),
        }
    }
    Err(format!("no folder can hold the preloaded library: {}", reasons.join("; ")))
}

/// Returns the folders that may hold it, best first: caches live longer than temporary files.
fn parents() -> Vec<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|text| !text.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    let mut parents: Vec<PathBuf> = cache.into_iter().collect();
    parents.extend([std::env::temp_dir(), PathBuf::from("/tmp")]);
    parents.dedup();
    parents
}

fn install_in(parent: &Path) -> std::io::Result<PathBuf> {
    let refuse = |reason: &str| Err(Error::new(ErrorKind::Unsupported, reason));
    // The dynamic linker splits names at spaces and colons and substitutes words that begin with a dollar sign.
    let is_special = |byte: &u8| b" :$\t\n".contains(byte);
    if !parent.is_absolute() || parent.as_os_str().as_bytes().iter().any(is_special) {
        return refuse("the dynamic linker does not take such a name");
    }
    if !parent.exists() {
        DirBuilder::new().mode(0o700).create(parent)?;
    }
    if statvfs(parent)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return refuse("mounted noexec, so that no library can be loaded from it");
    }
    let mut hasher = DefaultHasher::new();
    LIBRARY.hash(&mut hasher);
    let own = private_folder(parent.join(format!("xlogmem-exec-{}", geteuid().as_raw())))?;
    let folder = private_folder(own.join(format!("{:016x}", hasher.finish())))?;
    let path = folder.join(NAME);
    if std::fs::read(&path).is_ok_and(|present| present == LIBRARY) {
        return Ok(path);
    }
    let mut file = tempfile::NamedTempFile::new_in(&folder)?;
    file.write_all(LIBRARY)?;
    file.persist(&path)?;
    Ok(path)
}

/// Creates a folder that only this user can write to, or verifies an existing one.
fn private_folder(path: PathBuf) -> std::io::Result<PathBuf> {
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let is_private = |folder: &Metadata| {
        folder.is_dir() && folder.uid() == geteuid().as_raw() && folder.mode() & 0o022 == 0
    };
    if is_private(&std::fs::symlink_metadata(&path)?) {
        return Ok(path);
    }
    let reason = format!("{} is not a folder of this user alone", path.display());
    Err(Error::new(ErrorKind::PermissionDenied, reason))
}
