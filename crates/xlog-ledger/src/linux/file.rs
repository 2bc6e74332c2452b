//! Opening, validating and creating ledger files.
//!
//! A file appears under its name complete or not at all: it is written under another name and then linked. Linking never replaces a file,
//! and happens only while no living process uses another file (see `claim`). An existing file is never repaired or overwritten. Links are
//! not followed, and neither the directory nor the file may be writable by more users than the configuration allows.

use std::fs::{self, DirBuilder, File, FileType, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{
    DirBuilderExt, FileExt, FileTypeExt, OpenOptionsExt, PermissionsExt, fchown,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use super::access::{Access, check_directory, check_file};
use super::claim::{Claims, Inode};
use super::mapping::{effective_user, fill_holes};
use super::place::network_of;
use crate::config::{LedgerConfig, Sharing, check_limit};
use crate::error::{LedgerError, LedgerResult};
use crate::format::{FIXED_SIZE, HEADER_SIZE, Header, check_header, new_file};
use crate::key::DeviceKey;
use crate::snapshot::LedgerFile;

const SUFFIX: &str = ".ledger";
/// The maximum attempts to open or create; each failed one means that another process removed or created the file.
const ATTEMPTS: usize = 16;
/// Multiplied by the attempt's number. The expected wait is a few system calls of another opener.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
/// The age after which a draft counts as left by a killed process.
const ABANDONED: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct OpenFile {
    pub(super) file: File,
    pub(super) path: PathBuf,
    pub(super) header: Header,
    pub(super) created: bool,
    pub(super) inode: Inode,
    /// The claims, which are held.
    pub(super) claims: Claims,
}

/// Opens the ledger of `config`. Creates it if it is missing and there is a limit.
pub(super) fn open_or_create(config: &LedgerConfig) -> LedgerResult<OpenFile> {
    let Place { directory, path, is_default } = Place::of(config)?;
    let mut created = false;
    let mut displaced = false;
    for attempt in 0..ATTEMPTS {
        // Prepared in each attempt, because the directory may be removed meanwhile.
        let group = prepare_directory(&directory, config, is_default)?;
        let claims = Claims::open(&path, &config.key, is_default)?;
        let Some(group) = group else { return Err(missing(path, &claims)) };
        let access = Access { sharing: config.sharing, user: effective_user(), group };
        match open_existing(&path, &config.key, access) {
            Ok((file, header)) => {
                let inode = Inode::of_file(&file).map_err(|error| failed(&path, "stat", error))?;
                claims.hold(inode)?;
                displaced = claims.is_held_for_another(Some(inode))?;
                if !displaced && Inode::at(&path).is_ok_and(|named| named == inode) {
                    return Ok(OpenFile { file, path, header, created, inode, claims });
                }
            }
            Err(LedgerError::Missing { .. }) => {
                displaced = claims.is_held_for_another(None)?;
                if !displaced && config.limit.is_none() {
                    return Err(LedgerError::Missing { path });
                }
                if !displaced {
                    created = create(&directory, &path, config, group)?;
                    continue;
                }
            }
            Err(error) => return Err(error),
        }
        // Drops the own claims first: another opener may be checking whether its file was displaced.
        drop(claims);
        std::thread::sleep(FIRST_PAUSE * (attempt as u32));
    }
    if displaced {
        return Err(LedgerError::Displaced { path });
    }
    let source = io::Error::other("removed as often as it was created");
    Err(LedgerError::Io { path, call: "create", source })
}

/// Performs every step of creating a missing ledger except linking its final name, and removes all traces.
pub(super) fn rehearse_creation(config: &LedgerConfig) -> LedgerResult<()> {
    let place = Place::of(config)?;
    let present = place.directory.ancestors().find(|place| fs::symlink_metadata(place).is_ok());
    let outcome = rehearse_at(&place, config);
    let made = place.directory.ancestors().take_while(|place| Some(*place) != present);
    // Removes only empty directories, because another process may use one by now.
    made.map(fs::remove_dir).take_while(Result::is_ok).for_each(drop);
    outcome
}

fn rehearse_at(place: &Place, config: &LedgerConfig) -> LedgerResult<()> {
    let Place { directory, path, is_default } = place;
    let group = prepare_directory(directory, config, *is_default)?;
    let claims = Claims::open(path, &config.key, *is_default)?;
    if claims.is_held_for_another(None)? {
        return Err(LedgerError::Displaced { path: path.clone() });
    }
    let (Some(group), Some(limit)) = (group, config.limit) else {
        return Err(LedgerError::Missing { path: path.clone() });
    };
    let content = new_file(&config.key, config.slots, check_limit(limit)?);
    let [draft, second] = [(); 2].map(|()| directory.join(draft_name(&config.key)));
    let written = write_draft(&draft, &content, config.sharing, group)
        .and_then(|()| fs::hard_link(&draft, &second).map_err(|error| failed(path, "link", error)));
    for draft in [draft, second] {
        let _ = fs::remove_file(draft);
    }
    written
}

/// The location of a configuration's ledger.
struct Place {
    directory: PathBuf,
    path: PathBuf,
    is_default: bool,
}

impl Place {
    fn of(config: &LedgerConfig) -> LedgerResult<Self> {
        let directory = config.resolve_directory()?;
        let path = directory.join(format!("{}{SUFFIX}", config.key));
        Ok(Self { is_default: is_default(&directory), directory, path })
    }
}

fn is_default(directory: &Path) -> bool {
    LedgerConfig::default_directory().is_ok_and(|default| default == directory)
}

/// The error for a missing file: displaced if living processes use another file, else missing.
fn missing(path: PathBuf, claims: &Claims) -> LedgerError {
    match claims.is_held_for_another(None) {
        Ok(false) => LedgerError::Missing { path },
        Ok(true) => LedgerError::Displaced { path },
        Err(error) => error,
    }
}

/// Opens a ledger file of any owner for reading.
pub(super) fn open_for_reading(path: &Path) -> LedgerResult<File> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(missing_for_reading(path)),
        found => found.map_err(|error| failed(path, "stat", error))?,
    };
    expect_file(path, metadata.file_type())?;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(|error| missing_or(path, "open", error))?;
    read_header(path, &file).map(|_| file)
}

fn missing_for_reading(path: &Path) -> LedgerError {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let name = path.file_name().and_then(|name| name.to_str());
    let key = name.and_then(|name| DeviceKey::new(name.strip_suffix(SUFFIX)?).ok());
    let is_default = path.parent().is_some_and(is_default);
    match key.map(|key| Claims::open(&path, &key, is_default)) {
        Some(Ok(claims)) => missing(path, &claims),
        _ => LedgerError::Missing { path },
    }
}

/// Returns the ledgers of a directory, sorted by key. A missing directory has none.
pub fn list(directory: &Path) -> LedgerResult<Vec<LedgerFile>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(directory, "read directory", error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| failed(directory, "read directory", error))?;
        let name = entry.file_name();
        let key = name.to_str().and_then(|name| name.strip_suffix(SUFFIX));
        let Some(key) = key.and_then(|key| DeviceKey::new(key).ok()) else { continue };
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            found.push(LedgerFile { path: entry.path(), key });
        }
    }
    found.sort_by(|left, right| left.key.cmp(&right.key));
    Ok(found)
}

/// Creates the directory if there is a limit, and returns the group of its files; `None` if it is missing.
///
/// In the default directory's path all components are created, in another path only the last.
fn prepare_directory(
    directory: &Path,
    config: &LedgerConfig,
    is_default: bool,
) -> LedgerResult<Option<u32>> {
    if config.limit.is_some() {
        let shared = matches!(config.sharing, Sharing::Group { .. });
        match DirBuilder::new().mode(0o700).recursive(is_default).create(directory) {
            Ok(()) if shared => share_directory(directory, config.sharing)?,
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(directory, "create directory", error)),
        }
    }
    let metadata = match fs::symlink_metadata(directory) {
        Ok(metadata) => metadata,
        Err(error) if is_absent(&error) => return Ok(None),
        Err(error) => return Err(failed(directory, "stat", error)),
    };
    if !metadata.is_dir() {
        let (found, expected) = (kind_of(metadata.file_type()), "a directory");
        return Err(LedgerError::WrongKind { path: directory.to_owned(), found, expected });
    }
    check_directory(directory, (&metadata).into(), config.sharing, effective_user()).map(Some)
}

fn share_directory(directory: &Path, sharing: Sharing) -> LedgerResult<()> {
    let handle = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_DIRECTORY)
        .open(directory)
        .map_err(|error| failed(directory, "open", error))?;
    if let Sharing::Group { gid: Some(gid) } = sharing {
        fchown(&handle, None, Some(gid)).map_err(|error| failed(directory, "chgrp", error))?;
    }
    handle
        .set_permissions(Permissions::from_mode(0o2770))
        .map_err(|error| failed(directory, "chmod", error))
}

/// Checks the path before the open, so that no special file is opened, and the descriptor afterwards.
fn open_existing(path: &Path, key: &DeviceKey, access: Access) -> LedgerResult<(File, Header)> {
    let metadata = fs::symlink_metadata(path).map_err(|error| missing_or(path, "stat", error))?;
    expect_file(path, metadata.file_type())?;
    check_file(path, (&metadata).into(), access)?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(|error| match error.kind() {
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                LedgerError::ReadOnly { path: path.to_owned(), reason: error.to_string() }
            }
            _ => missing_or(path, "open", error),
        })?;
    let metadata = file.metadata().map_err(|error| failed(path, "stat", error))?;
    expect_file(path, metadata.file_type())?;
    check_file(path, (&metadata).into(), access)?;
    let header = read_header(path, &file)?;
    if header.key != *key {
        return Err(LedgerError::WrongKey {
            path: path.to_owned(),
            found: header.key.to_string(),
            expected: key.to_string(),
        });
    }
    if let Some(kind) = network_of(&file).map_err(|error| failed(path, "statfs", error))? {
        return Err(LedgerError::NotLocal { path: path.to_owned(), kind });
    }
    fill_holes(&file, header.file_size)
        .map_err(|source| LedgerError::NoRoom { path: path.to_owned(), source })?;
    Ok((file, header))
}

/// Reads and checks the header.
pub(super) fn read_header(path: &Path, file: &File) -> LedgerResult<Header> {
    check_steady(path, || {
        let bytes = read_start(file, HEADER_SIZE).map_err(|error| failed(path, "read", error))?;
        // An upgrade grows the file before it replaces the header, so the size is read last.
        let size = file.metadata().map_err(|error| failed(path, "stat", error))?.len();
        Ok((bytes, size))
    })
}

/// Checks the header and the size of the file that `look` reads. Another process may upgrade the file meanwhile, so an error counts only
/// if a second look gives the same.
fn check_steady(
    path: &Path,
    mut look: impl FnMut() -> LedgerResult<(Vec<u8>, u64)>,
) -> LedgerResult<Header> {
    let fixed = |bytes: &[u8]| bytes.get(..FIXED_SIZE).map(<[u8]>::to_vec);
    let (mut bytes, mut size) = look()?;
    loop {
        let checked = check_header(path, &bytes, size);
        if checked.is_ok() {
            return checked;
        }
        let (again, size_again) = look()?;
        if fixed(&again) == fixed(&bytes) && size_again == size {
            return checked;
        }
        (bytes, size) = (again, size_again);
    }
}

/// Reads the first `length` bytes of a file, or fewer if the file is shorter.
pub(super) fn read_start(file: &File, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// Writes a new file and links it to its name. Returns false if another process was faster or interfered; the caller retries.
fn create(directory: &Path, path: &Path, config: &LedgerConfig, group: u32) -> LedgerResult<bool> {
    let Some(limit) = config.limit else { return Ok(false) };
    let content = new_file(&config.key, config.slots, check_limit(limit)?);
    sweep(directory, &config.key);
    let draft = directory.join(draft_name(&config.key));
    let written = match write_draft(&draft, &content, config.sharing, group) {
        // The directory was removed; the next attempt creates it again.
        Err(LedgerError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
            return Ok(false);
        }
        written => written,
    };
    let linked = written.and_then(|()| match fs::hard_link(&draft, path) {
        Ok(()) => Ok(true),
        // The draft was swept or the name is taken; the next attempt finds out.
        Err(error) if matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::NotFound) => {
            Ok(false)
        }
        Err(error) => Err(failed(path, "link", error)),
    });
    // Best effort: a later creator sweeps a remaining draft.
    let _ = fs::remove_file(&draft);
    linked
}

/// Writes every byte, because a full file system could not fill a hole later.
fn write_draft(draft: &Path, content: &[u8], sharing: Sharing, group: u32) -> LedgerResult<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(draft)
        .map_err(|error| failed(draft, "create", error))?;
    let mode = match sharing {
        Sharing::Private => 0o600,
        Sharing::Group { .. } => {
            fchown(&file, None, Some(group)).map_err(|error| failed(draft, "chgrp", error))?;
            0o660
        }
    };
    file.set_permissions(Permissions::from_mode(mode))
        .map_err(|error| failed(draft, "chmod", error))?;
    file.write_all(content).map_err(|error| failed(draft, "write", error))
}

fn draft_prefix(key: &DeviceKey) -> String {
    format!(".{key}{SUFFIX}.")
}

fn draft_name(key: &DeviceKey) -> String {
    static DRAFTS: AtomicU32 = AtomicU32::new(0);
    let count = DRAFTS.fetch_add(1, Ordering::Relaxed);
    let clock = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
    format!("{}{}.{count}.{clock:x}.tmp", draft_prefix(key), std::process::id())
}

/// Removes drafts of killed creators. Best effort: a draft is never opened and only takes space.
fn sweep(directory: &Path, key: &DeviceKey) {
    let prefix = draft_prefix(key);
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let is_draft = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(&prefix) && name.ends_with(".tmp"));
        let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        if is_draft && age().is_some_and(|age| age > ABANDONED) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn expect_file(path: &Path, kind: FileType) -> LedgerResult<()> {
    if kind.is_file() {
        return Ok(());
    }
    let (found, expected) = (kind_of(kind), "a regular file");
    Err(LedgerError::WrongKind { path: path.to_owned(), found, expected })
}

fn kind_of(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_symlink() => "a symbolic link",
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_file() => "a regular file",
        _ => "a device",
    }
}

/// True if the path or one of its components does not exist.
pub(super) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

fn missing_or(path: &Path, call: &'static str, error: io::Error) -> LedgerError {
    if error.kind() == ErrorKind::NotFound {
        return LedgerError::Missing { path: path.to_owned() };
    }
    failed(path, call, error)
}

pub(super) fn failed(path: &Path, call: &'static str, source: io::Error) -> LedgerError {
    LedgerError::Io { path: path.to_owned(), call, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_that_was_read_beside_an_upgrade_is_read_again_and_a_bad_one_twice() {
        let key = DeviceKey::new("sim-0").unwrap();
        let whole = new_file(&key, 4, 8);
        let size = whole.len() as u64;
        let path = Path::new("/d/sim-0.ledger");
        // A look that fell between the growth of the file and its new header.
        for torn in [size - 1, size / 2] {
            let mut sizes = [torn, size].into_iter();
            let read = check_steady(path, || Ok((whole.clone(), sizes.next().unwrap())));
            assert_eq!(read.unwrap().file_size, size);
        }
        let mut looks = 0;
        let bad = check_steady(path, || {
            looks += 1;
            Ok((whole.clone(), size / 2))
        });
        assert!(bad.is_err() && looks == 2, "{looks}: {bad:?}");
    }
}
