//! The library in programs: a fake driver, and C programs that reach it in every way, without a GPU.

#![cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod charging;
mod graphs;
mod lifetimes;
mod logging;
mod processes;
mod races;
mod resolution;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use xlog_ledger::{DeviceKey, Ledger, LedgerConfig, LedgerView, Snapshot, list};

const MIB: u64 = 1 << 20;
/// The limit of a ledger that the library creates on the fake device: 1 GiB less a sixteenth.
const LEDGER_LIMIT: u64 = 960 * MIB;
const OUT_OF_MEMORY: i32 = 2;
/// The ways in which a program reaches the driver.
const WAYS: [&str; 5] = ["linked", "dlsym", "proc", "proc2", "per-thread"];

/// The preloaded library, as `cargo test` built it.
fn preload() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let library = tests.parent().unwrap().join("libxlog_preload.so");
    assert!(library.exists(), "{} is missing", library.display());
    library
}

/// A folder with the fake driver and the programs, compiled once.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("xlog-preload");
        std::fs::create_dir_all(&folder).unwrap();
        let source =
            |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite").join(name);
        let compile = |arguments: &[&str], input: &str, output: &str| {
            // Complete when it appears: another test run may use the folder.
            let unfinished = folder.join(format!("{output}.{}", std::process::id()));
            let mut compiler = Command::new("cc");
            compiler.arg(source(input)).args(["-Wall", "-Werror", "-o"]).arg(&unfinished);
            assert!(compiler.args(arguments).status().unwrap().success(), "{input}");
            std::fs::rename(unfinished, folder.join(output)).unwrap();
        };
        let shared = ["-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"];
        compile(&shared, "fake_cuda.c", "libcuda.so.1");
        let driver = folder.join("libcuda.so.1");
        for name in ["libcudart.so.12", "libother.so"] {
            compile(&["-shared", "-fPIC"], "forward.c", name);
        }
        compile(&["-ldl", "-pthread"], "program.c", "loaded");
        let quiet = ["-DLINKED", "-fno-builtin", driver.to_str().unwrap(), "-ldl", "-pthread"];
        compile(&quiet, "program.c", "linked");
        folder
    })
}

/// A folder of one test, removed at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("xlog-preload-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn ledgers(&self) -> PathBuf {
        self.0.join("ledgers")
    }

    /// Joins the ledger that a process has created.
    fn open_ledger(&self) -> Ledger {
        let file = list(&self.ledgers()).unwrap().pop().unwrap();
        let config = LedgerConfig::new(DeviceKey::new(file.key.as_str()).unwrap());
        Ledger::open(config.with_directory(self.ledgers())).unwrap()
    }

    /// The ledger, once a process has joined it.
    fn snapshot(&self) -> Option<Snapshot> {
        let file = list(&self.ledgers()).ok()?.pop()?;
        Some(LedgerView::open(file.path).unwrap().snapshot().unwrap())
    }

    /// The bytes that living processes use, on all devices.
    fn used(&self) -> u64 {
        let files = list(&self.ledgers()).unwrap_or_default();
        let snapshots = files.iter().map(|file| LedgerView::open(&file.path)?.snapshot());
        let slots = snapshots.flat_map(|snapshot| snapshot.unwrap().slots);
        slots.filter(|slot| slot.alive).map(|slot| slot.used).sum()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A running program, with the library unless `bare`.
struct Program {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn start(way: &str, scratch: &Scratch, settings: &[(&str, &str)]) -> Self {
        Self::spawn(way, command(way, scratch).envs(settings.iter().copied()))
    }

    fn spawn(way: &str, command: &mut Command) -> Self {
        let mut child = command
            .arg(way)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// The answer to a command.
    fn ask(&mut self, command: &str) -> String {
        writeln!(self.input.as_mut().unwrap(), "{command}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "{command}: the program has ended: {}", self.errors());
        line.trim_end().to_owned()
    }

    /// The status and the value of a driver call.
    fn call(&mut self, command: &str) -> (i32, u64) {
        let answer = self.ask(command);
        let (status, value) = answer.split_once(' ').unwrap_or_else(|| panic!("{answer}"));
        let value = u64::from_str_radix(value.trim_start_matches("0x"), 16).unwrap();
        (status.parse().unwrap(), value)
    }

    /// The value of a driver call that succeeds.
    fn get(&mut self, command: &str) -> u64 {
        let (status, value) = self.call(command);
        assert_eq!(status, 0, "{command}");
        value
    }

    /// Begins a command on another thread; `join` gives its answer.
    fn begin(&mut self, command: &str) -> u64 {
        self.get(&format!("begin {command}"))
    }

    /// Begins a command on another thread and waits until it is inside `call` of the fake driver, where it stays until `go CALL`.
    /// Returns the thread.
    fn begin_inside(&mut self, call: &str, command: &str) -> u64 {
        self.get(&format!("hold {call}"));
        let thread = self.begin(command);
        self.get(&format!("arrived {call}"));
        thread
    }

    /// The bytes that the fake driver has given out.
    fn driver_bytes(&mut self) -> u64 {
        self.ask("used").parse().unwrap()
    }

    fn errors(&mut self) -> String {
        let mut text = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }

    /// Ends the program; its status and what it wrote to standard error.
    fn end(mut self) -> (ExitStatus, String) {
        drop(self.input.take());
        let errors = self.errors();
        (self.child.wait().unwrap(), errors)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

fn command(way: &str, scratch: &Scratch) -> Command {
    let name = if way == "linked" { "linked" } else { "loaded" };
    let mut command = Command::new(built().join(name));
    command
        .env("LD_LIBRARY_PATH", built())
        .env("LD_PRELOAD", preload())
        .env("XLOG_EXEC_LEDGER", scratch.ledgers());
    command
}

/// Starts a program that has called `cuInit` and has a context.
fn initialized(way: &str, scratch: &Scratch, settings: &[(&str, &str)]) -> Program {
    let mut program = Program::start(way, scratch, settings);
    assert_eq!(program.get("init"), 0xc0de);
    program
}
