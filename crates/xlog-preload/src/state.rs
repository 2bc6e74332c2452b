//! The state of the process: settings, accounts, tables and log.
//!
//! The first intercepted allocating call in a current context creates it. It is never dropped, because other threads and exit handlers may
//! use it until the end. A forked child discards its parent's state and creates its own, with its own slot and log.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use xlog_base::Mutex;
use xlog_trace::{StackId, resolve_stacks};

use crate::account::Account;
use crate::blocks::Blocks;
use crate::caller::{self, Callers};
use crate::contexts::Contexts;
use crate::driver::{Driver, is_initialized};
use crate::graphs::Graphs;
use crate::handles::Handles;
use crate::log::Log;
use crate::messages::{Kind, say_once};
use crate::outstanding::Outstanding;
use crate::pools::Pools;
use crate::settings::Settings;

/// The maximum number of counted devices; calls for further ones are passed on.
const MAX_DEVICES: usize = 64;

static STATE: AtomicPtr<State> = AtomicPtr::new(null_mut());
static WATCHES_FORKS: AtomicBool = AtomicBool::new(false);

/// The state of this library in one process.
pub(crate) struct State {
    pub(crate) driver: Driver,
    settings: Settings,
    accounts: Box<[OnceLock<Account>]>,
    pub(crate) blocks: Mutex<Blocks>,
    pub(crate) handles: Mutex<Handles>,
    pub(crate) pools: Mutex<Pools>,
    pub(crate) outstanding: Outstanding,
    pub(crate) graphs: Graphs,
    pub(crate) contexts: Mutex<Contexts>,
    pub(crate) callers: Mutex<Callers>,
    log: OnceLock<Option<Log>>,
    /// The number of allocations, for sampling stacks.
    allocations: AtomicU32,
}

/// Returns the state, creating it if necessary; `None` before the program's `cuInit`.
pub(crate) fn state() -> Option<&'static State> {
    existing().or_else(|| is_initialized().then(create))
}

/// Returns the state if it exists.
pub(crate) fn existing() -> Option<&'static State> {
    // SAFETY: a published state is never dropped.
    unsafe { STATE.load(Ordering::Acquire).as_ref() }
}

#[cold]
fn create() -> &'static State {
    if !WATCHES_FORKS.swap(true, Ordering::AcqRel) {
        // SAFETY: the handler is a function of this library, which is preloaded and therefore never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(forget)) };
    }
    let state = Box::into_raw(Box::new(State::new()));
    match STATE.compare_exchange(null_mut(), state, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            // SAFETY: published just now and never dropped.
            let state = unsafe { &*state };
            state.announce();
            state
        }
        Err(other) => {
            // SAFETY: this value was made above and is not published.
            drop(unsafe { Box::from_raw(state) });
            // SAFETY: a published state is never dropped.
            unsafe { &*other }
        }
    }
}

/// Discards the state in a forked child.
extern "C" fn forget() {
    STATE.store(null_mut(), Ordering::Release);
}

impl State {
    fn new() -> Self {
        Self {
            driver: Driver::load(),
            settings: Settings::from_environment(),
            accounts: (0..MAX_DEVICES).map(|_| OnceLock::new()).collect(),
            blocks: Mutex::default(),
            handles: Mutex::default(),
            pools: Mutex::default(),
            outstanding: Outstanding::default(),
            graphs: Graphs::default(),
            contexts: Mutex::default(),
            callers: Mutex::default(),
            log: OnceLock::new(),
            allocations: AtomicU32::new(0),
        }
    }

    /// Writes a note for `xlogmem exec` that calls are intercepted.
    fn announce(&self) {
        // Without the note `xlogmem exec` reports that nothing was intercepted, which does not affect the program.
        self.write_note(format!("{}\n", std::process::id()).as_bytes());
        if let Some(text) = &self.settings.rejected {
            say_once(Kind::Settings, text);
        }
    }

    /// Appends a line to the run's note by one system call.
    fn write_note(&self, line: &[u8]) {
        if let Some(path) = &self.settings.note {
            let file = OpenOptions::new().append(true).create(true).open(path);
            let _ = file.and_then(|mut file| file.write_all(line));
        }
    }

    /// Claims a log in the run's note. Returns true if another process, or this one before an `exec`, has claimed it. After the run the
    /// note no longer exists; then an existing log counts as claimed, and a missing one is created.
    fn claim_log(&self, log: &Path) -> bool {
        let Some(note) = &self.settings.note else { return false };
        let name = log.as_os_str().as_bytes();
        let process = std::process::id().to_string();
        let line = [process.as_bytes(), b" ", name, b"\n"].concat();
        self.write_note(&line);
        let text = std::fs::read(note).unwrap_or_default();
        let is_claim = |found: &&[u8]| {
            found.iter().position(|byte| *byte == b' ').is_some_and(|at| found[at + 1..] == *name)
        };
        let mut claims = text.split(|byte| *byte == b'\n').filter(is_claim);
        let is_own = |found: &[u8]| found == &line[..line.len() - 1];
        match claims.next() {
            Some(first) => !is_own(first) || claims.any(is_own),
            None => {
                let created = OpenOptions::new().write(true).create_new(true).open(log);
                created.is_err_and(|error| error.kind() == ErrorKind::AlreadyExists)
            }
        }
    }

    pub(crate) fn account(&self, device: u32) -> Option<&Account> {
        let account = self.accounts.get(device as usize)?;
        Some(account.get_or_init(|| Account::open(&self.driver, &self.settings, device)))
    }

    /// True if the settings request a log.
    pub(crate) fn is_logged(&self) -> bool {
        self.settings.log.is_some()
    }

    /// The log, created on first use.
    pub(crate) fn log(&self) -> Option<&Log> {
        let log = self.log.get_or_init(|| {
            let pattern = self.settings.log.as_ref()?;
            if self.settings.stacks > 0 {
                // Reads the program's symbols now, so that the writer does not do it while the program exits.
                let _ = caller::stack(self);
                resolve_stacks();
            }
            let name = self.driver.name(0).unwrap_or_default();
            Log::create(pattern, name, |path| self.claim_log(path))
        });
        log.as_ref()
    }

    /// Captures the stack of this allocation if it is sampled.
    pub(crate) fn sample_stack(&self) -> Option<StackId> {
        let every = self.settings.stacks;
        if every == 0 {
            return None;
        }
        let number = self.allocations.fetch_add(1, Ordering::Relaxed);
        number.is_multiple_of(every).then(|| caller::stack(self))
    }
}
