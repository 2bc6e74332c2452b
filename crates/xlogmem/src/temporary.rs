//! Temporary files, folders and child processes of a command.
//!
//! Files and folders are created exclusively, under a name with a random part, so that a link planted in their place is never followed.
//! They go when their owner is dropped, and also when the process is ended by SIGINT, SIGTERM or SIGHUP: everything temporary is
//! registered, a thread that waits for these signals removes it, and then lets the signal do what it does by default.
//!
//! Invariant: something temporary is created and registered under one lock, which the signal thread takes first. So it is
//! either not there yet or registered when the process ends.

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

/// Something that is removed when the process is interrupted.
#[derive(Debug)]
enum Removal {
    File(PathBuf),
    /// With what is in it.
    Folder(PathBuf),
    /// Only if it is empty.
    EmptyFolder(PathBuf),
    Process(Pid),
}

impl Removal {
    /// A failure is what an interrupted process cannot report any more.
    fn remove(&self) {
        match self {
            Self::File(path) => drop(std::fs::remove_file(path)),
            Self::Folder(path) => drop(std::fs::remove_dir_all(path)),
            Self::EmptyFolder(path) => drop(std::fs::remove_dir(path)),
            Self::Process(pid) => drop(kill_process(*pid, Signal::KILL)),
        }
    }
}

/// Everything registered, in the order of its creation, with its number.
#[derive(Debug)]
struct Registry {
    next: u64,
    removals: Vec<(u64, Removal)>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { next: 0, removals: Vec::new() });

fn registry() -> MutexGuard<'static, Registry> {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // Without this thread, an interrupted process leaves its temporary files; that is no reason not to begin.
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

/// Removes everything, newest first, and ends the process as the signal does by default.
fn end(signal: i32) {
    // Held to the end: nothing is created after this.
    let registry = registry();
    // Processes first, so that they write nothing into a folder that goes.
    let is_process = |removal: &Removal| matches!(removal, Removal::Process(_));
    for processes in [true, false] {
        let removals = registry.removals.iter().rev().map(|(_, removal)| removal);
        removals.filter(|removal| is_process(removal) == processes).for_each(Removal::remove);
    }
    let _ = emulate_default_handler(signal);
    std::process::exit(128 + signal);
}

/// Holds back the end of the process by a signal while several steps belong together.
pub(crate) fn uninterrupted<T>(steps: impl FnOnce() -> T) -> T {
    let _held = registry();
    steps()
}

/// Something that is registered until this is dropped.
#[derive(Debug)]
pub(crate) struct Registered(u64);

impl Drop for Registered {
    fn drop(&mut self) {
        registry().removals.retain(|(number, _)| *number != self.0);
    }
}

/// Creates something and registers it.
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

/// A new file in a folder, with the permissions that outputs have.
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

/// The place of a temporary file.
#[derive(Debug)]
pub(crate) struct File {
    path: TempPath,
    _registered: Registered,
}

impl File {
    /// Moves it to its place; what is there is replaced.
    pub(crate) fn persist(self, place: &Path) -> io::Result<()> {
        self.path.persist(place).map_err(|error| error.error)
    }
}

/// A folder for this user alone, removed with what is in it.
#[derive(Debug)]
pub(crate) struct Folder {
    folder: TempDir,
    _registered: Registered,
}

impl Folder {
    /// A new one in another folder.
    pub(crate) fn create_in(parent: &Path, prefix: &str) -> io::Result<Self> {
        let (folder, registered) = create(
            || Builder::new().prefix(prefix).tempdir_in(parent),
            |folder| Removal::Folder(folder.path().to_owned()),
        )?;
        Ok(Self { folder, _registered: registered })
    }

    /// A new one where temporary files go.
    pub(crate) fn create(prefix: &str) -> io::Result<Self> {
        Self::create_in(&std::env::temp_dir(), prefix)
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A folder that was made on the way to an output; removed if it is empty, unless it is kept.
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
            // The failure that led here is what is reported.
            let _ = std::fs::remove_dir(path);
        }
    }
}

/// Starts a process that does not outlive this one, unless this one is killed outright.
///
/// Drop the registration once the process was waited for.
pub(crate) fn process(command: &mut Command) -> io::Result<(Child, Registered)> {
    create(|| command.spawn(), |child| Removal::Process(Pid::from_child(child)))
}
