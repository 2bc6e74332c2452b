//! Temporary files, folders and child processes of a command.
//!
//! Files and folders are created exclusively, under a name with a random part, so that a planted link is never followed.
//! They are removed when their owner is dropped, and on SIGINT, SIGTERM and SIGHUP: a thread waits for these signals,
//! removes all registered objects, and then performs the signal's default action.
//!
//! Invariant: creation and registration happen under one lock, which the signal thread takes first. So a temporary object
//! either does not exist yet or is registered when the process ends.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Once;

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tempfile::{Builder, TempDir, TempPath};
use xlog_base::{Mutex, MutexGuard};

/// An object that is removed when the process is interrupted.
#[derive(Debug)]
enum Removal {
    File(PathBuf),
    /// Removed with its contents.
    Folder(PathBuf),
    /// Removed only if it is empty.
    EmptyFolder(PathBuf),
    Process(Pid),
}

impl Removal {
    /// Removes the object. An interrupted process can no longer report a failure.
    fn remove(&self) {
        match self {
            Self::File(path) => drop(std::fs::remove_file(path)),
            Self::Folder(path) => drop(std::fs::remove_dir_all(path)),
            Self::EmptyFolder(path) => drop(std::fs::remove_dir(path)),
            Self::Process(pid) => drop(kill_process(*pid, Signal::KILL)),
        }
    }
}

/// The registered objects, numbered in the order of their creation.
#[derive(Debug)]
struct Registry {
    next: u64,
    removals: Vec<(u64, Removal)>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { next: 0, removals: Vec::new() });

fn registry() -> MutexGuard<'static, Registry> {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // Without this thread, an interrupted process leaves its temporary files. That must not prevent the command.
        if let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) {
            let wait = move || {
                if let Some(signal) = signals.forever().next() {
                    end(signal);
                }
            };
            let _ = std::thread::Builder::new().name("signals".to_owned()).spawn(wait);
        }
    });
    REGISTRY.lock()
}

/// Removes all objects, the newest first, and ends the process by the signal's default action.
fn end(signal: i32) {
    // Held to the end, so that nothing is created afterwards.
    let registry = registry();
    // Processes end first, so that they write nothing into a removed folder.
    let is_process = |removal: &Removal| matches!(removal, Removal::Process(_));
    for processes in [true, false] {
        let removals = registry.removals.iter().rev().map(|(_, removal)| removal);
        removals.filter(|removal| is_process(removal) == processes).for_each(Removal::remove);
    }
    let _ = emulate_default_handler(signal);
    std::process::exit(128 + signal);
}

/// Delays the end of the process by a signal until `steps` are done.
pub(crate) fn uninterrupted<T>(steps: impl FnOnce() -> T) -> T {
    let _held = registry();
    steps()
}

/// An object that stays registered until this is dropped.
#[derive(Debug)]
pub(crate) struct Registered(u64);

impl Drop for Registered {
    fn drop(&mut self) {
        registry().removals.retain(|(number, _)| *number != self.0);
    }
}

/// Creates an object and registers it.
fn create<T>(
    create: impl FnOnce() -> io::Result<T>,
    removal: impl FnOnce(&T) -> Removal,
) -> io::Result<(T, Registered)> {
    let mut registry = registry();
    let made = create()?;
    let number = registry.next;
    registry.next += 1;
    registry.removals.push((number, removal(&made)));
    Ok((made, Registered(number)))
}

/// Creates a file in a folder, with the permissions of outputs.
pub(crate) fn file(folder: &Path, prefix: &str) -> io::Result<(std::fs::File, File)> {
    let mut builder = Builder::new();
    builder.prefix(prefix);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let (made, registered) =
        create(|| builder.tempfile_in(folder), |made| Removal::File(made.path().to_owned()))?;
    let (file, path) = made.into_parts();
    Ok((file, File { path, _registered: registered }))
}

/// The path of a temporary file.
#[derive(Debug)]
pub(crate) struct File {
    path: TempPath,
    _registered: Registered,
}

impl File {
    /// Moves it to its destination and replaces an existing file.
    pub(crate) fn persist(self, place: &Path) -> io::Result<()> {
        self.path.persist(place).map_err(|error| error.error)
    }
}

/// A folder that is private to this user and removed with its contents.
#[derive(Debug)]
pub(crate) struct Folder {
    folder: TempDir,
    _registered: Registered,
}

impl Folder {
    /// Creates one in another folder.
    pub(crate) fn create_in(parent: &Path, prefix: &str) -> io::Result<Self> {
        let (folder, registered) = create(
            || Builder::new().prefix(prefix).tempdir_in(parent),
            |folder| Removal::Folder(folder.path().to_owned()),
        )?;
        Ok(Self { folder, _registered: registered })
    }

    /// Creates one in the system's temporary folder.
    pub(crate) fn create(prefix: &str) -> io::Result<Self> {
        Self::create_in(&std::env::temp_dir(), prefix)
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A folder created on the path of an output; removed if it is empty, unless it is kept.
#[derive(Debug)]
pub(crate) struct EmptyFolder {
    path: Option<PathBuf>,
    _registered: Registered,
}

impl EmptyFolder {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let (_, registered) =
            create(|| std::fs::create_dir(path), |()| Removal::EmptyFolder(path.to_owned()))?;
        Ok(Self { path: Some(path.to_owned()), _registered: registered })
    }

    pub(crate) fn keep(mut self) {
        self.path = None;
    }
}

impl Drop for EmptyFolder {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // The failure that led here is the one to report.
            let _ = std::fs::remove_dir(path);
        }
    }
}

/// Starts a process that ends with this one, unless this one is killed by SIGKILL.
///
/// Drop the registration after waiting for the process.
pub(crate) fn process(command: &mut Command) -> io::Result<(Child, Registered)> {
    create(|| command.spawn(), |child| Removal::Process(Pid::from_child(child)))
}
