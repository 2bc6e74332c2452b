//! Eight processes under one limit, through their runtimes, one of them Python, while others are killed and stopped in the middle.
//!
//! A watching thread adds up what their blocks take. After each round everybody pauses: what they hold of the card must be what the
//! ledger counts, and what the living leave must be had in one request, dead and stopped ones notwithstanding.
//!
//! `XLOG_TEST_DEVICE` names the device (`sim`), `XLOG_LEDGER_ROUNDS` the rounds (60; 20 on a GPU), `XLOG_LEDGER_SEED` replays the
//! choices, not the kernel's scheduling.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use xlog_cuda::device_runtime::{
    AllocTag, OomPolicy, ResourceError, ResourceKind, StreamId, XlogDeviceRuntime,
};
use xlog_cuda::ledger::UNIT;
use xlog_cuda::{CudaDevice, DeviceSpec};
use xlog_testing::turn;

use crate::cells::{Cells, Field, HOLD, PAUSE, QUIT, RUN, WORKERS};
use crate::support::{MIB, Process, Random, TestDirectory, python, seed, wait_until};
use crate::worker::{LARGEST, LOCK_DEADLINE};

const LIMIT: u64 = 320 * MIB;
/// How long rounds go on until everything that is to be judged has happened.
const LONGEST: Duration = Duration::from_secs(200);
/// The row of the Python process.
const PYTHON: usize = WORKERS - 1;
const RESOURCES: [&str; PYTHON] = ["async", "pool", "direct", "async", "pool", "direct", "async"];

struct Fleet {
    directory: TestDirectory,
    device: DeviceSpec,
    cells: Arc<Cells>,
    workers: Vec<Process>,
    /// Judges by allocating through a runtime of its own.
    judge: XlogDeviceRuntime,
    python: Option<PathBuf>,
    random: Random,
    commands: u64,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    killed: u64,
    stopped: u64,
    stopped_holding_the_lock: u64,
    dead_bytes_regained: u64,
}

impl Fleet {
    fn new(seed: u64, device: DeviceSpec) -> Self {
        let directory = TestDirectory::new();
        let cells = Arc::new(Cells::create(&directory.path().join("cells")));
        std::fs::create_dir(directory.path().join("xlog_ledger")).unwrap();
        for (name, text) in [
            (
                "xlog_ledger/__init__.py",
                include_str!("../../../xlog-ledger/python/xlog_ledger/__init__.py"),
            ),
            (
                "xlog_ledger/_format.py",
                include_str!("../../../xlog-ledger/python/xlog_ledger/_format.py"),
            ),
            (
                "xlog_ledger/_places.py",
                include_str!("../../../xlog-ledger/python/xlog_ledger/_places.py"),
            ),
            ("worker.py", include_str!("../../../xlog-ledger/tests/suite/worker.py")),
        ] {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        let config =
            directory.config(ResourceKind::Direct, LIMIT).with_ledger_deadline(LOCK_DEADLINE);
        let opened = Arc::new(CudaDevice::open_spec(device).unwrap());
        let judge = XlogDeviceRuntime::with_config(opened, &config).unwrap();
        // It does not ask the others for what they have cached: what is free is what they leave.
        judge.budget().unwrap().set_policy(OomPolicy::impatient());
        let (python, random) = (python(), Random::new(seed));
        let (commands, counts) = (0, Counts::default());
        let mut fleet = Self {
            directory,
            device,
            cells,
            workers: Vec::new(),
            judge,
            python,
            random,
            commands,
            counts,
        };
        for row in 0..WORKERS {
            let process = fleet.spawn(row);
            fleet.workers.push(process);
        }
        fleet
    }

    fn spawn(&mut self, row: usize) -> Process {
        let seed = self.random.next_u64();
        let directory = self.directory.path();
        if let (Some(python), PYTHON) = (&self.python, row) {
            let mut command = Command::new(python);
            command
                .arg(directory.join("worker.py"))
                .args([self.directory.ledger_path(), directory.join("cells")])
                .args([row.to_string(), seed.to_string(), LARGEST.to_string()])
                .env("PYTHONPATH", directory)
                .env("PYTHONDONTWRITEBYTECODE", "1");
            return Process::spawn(command);
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "worker::role", "--ignored", "--nocapture"])
            .env("XLOG_DEVICE", self.device.to_string())
            .env("XLOG_DEVICE_LEDGER", self.directory.ledger_path())
            .env("XLOG_DEVICE_BUDGET", "100%")
            .env("XLOG_DEVICE_RESOURCE", RESOURCES.get(row).copied().unwrap_or("pool"))
            .env("XLOG_FLEET_DIRECTORY", directory)
            .env("XLOG_FLEET_ROW", row.to_string())
            .env("XLOG_FLEET_SEED", seed.to_string())
            .stdout(Stdio::null());
        Process::spawn(command)
    }

    /// Tells a worker what to do; answers the command, to wait for.
    fn tell(&mut self, row: usize, kind: u64) -> u64 {
        self.commands += 1;
        let command = self.commands << 8 | kind;
        self.cells.store(row, Field::Command, command);
        command
    }

    fn await_answer(&mut self, row: usize, command: u64) {
        let (cells, worker) = (&self.cells, &mut self.workers[row]);
        wait_until("a worker answers", || {
            if let Some(status) = worker.0.try_wait().unwrap() {
                panic!("worker {row} ended by itself: {status}");
            }
            cells.load(row, Field::Answer) == command
        });
    }

    fn pause(&mut self, microseconds: u64) {
        let microseconds = self.random.below_u64(microseconds);
        std::thread::sleep(Duration::from_micros(microseconds));
    }

    /// Kills a worker. From the sentence on, what it holds is not counted: the kernel takes it.
    fn kill(&mut self, row: usize) {
        self.cells.store(row, Field::Doomed, 1);
        self.workers[row].kill();
        self.counts.killed += 1;
        self.counts.dead_bytes_regained += self.cells.units(row) * UNIT;
    }

    /// A new process in the place of a dead one.
    fn revive(&mut self, row: usize) {
        let changes = self.cells.load(row, Field::Truth) >> 32;
        self.cells.store(row, Field::Truth, (changes + 1) << 32);
        self.cells.store(row, Field::Doomed, 0);
        self.workers[row] = self.spawn(row);
    }

    /// Work, with some misfortune. Answers who died.
    fn disturb(&mut self) -> Vec<usize> {
        let mut dead = Vec::new();
        for row in 0..WORKERS {
            self.tell(row, RUN);
        }
        self.pause(120_000);
        let row = self.random.below_u64(WORKERS as u64) as usize;
        if self.random.below_u64(2) == 0 {
            self.workers[row].signal(libc::SIGSTOP);
            self.pause(40_000);
            self.workers[row].signal(libc::SIGCONT);
            self.counts.stopped += 1;
        }
        if self.random.below_u64(5) == 0 {
            self.stop_a_lock_holder(row, &mut dead);
        }
        let row = self.random.below_u64(WORKERS as u64) as usize;
        if self.random.below_u64(2) == 0 && !dead.contains(&row) {
            self.kill(row);
            dead.push(row);
            self.pause(20_000);
        }
        dead
    }

    /// Stops a worker while it holds the file lock; the others go on or are refused. Then it dies, or goes on.
    fn stop_a_lock_holder(&mut self, row: usize, dead: &mut Vec<usize>) {
        let command = self.tell(row, HOLD);
        self.await_answer(row, command);
        self.workers[row].stop();
        self.pause(80_000);
        self.counts.stopped_holding_the_lock += 1;
        if self.random.below_u64(2) == 0 {
            self.kill(row);
            dead.push(row);
        } else {
            self.tell(row, RUN);
            self.workers[row].signal(libc::SIGCONT);
        }
    }

    /// With everybody standing still: what is free is what the living leave, and it can be had at once.
    fn judge(&mut self, dead: &[usize]) {
        let living: Vec<usize> = (0..WORKERS).filter(|row| !dead.contains(row)).collect();
        let commands: Vec<u64> = living.iter().map(|row| self.tell(*row, PAUSE)).collect();
        for (row, command) in living.iter().zip(commands) {
            self.await_answer(*row, command);
        }
        let stopped = (self.random.below_u64(3) == 0)
            .then(|| living[self.random.below_u64(living.len() as u64) as usize]);
        if let Some(row) = stopped {
            self.workers[row].stop();
        }
        let is_python = |row: usize| row == PYTHON && self.python.is_some();
        let physical = |row: usize| match is_python(row) {
            true => self.cells.units(row) * UNIT,
            false => self.cells.load(row, Field::Physical),
        };
        let used: u64 = living.iter().map(|row| physical(*row)).sum();
        assert!(used <= LIMIT, "{used} of {LIMIT}");
        let free = (LIMIT - used) as usize;
        let ask = |bytes| self.judge.allocate(bytes, StreamId::DEFAULT, AllocTag("judge"));
        // Blocks take whole steps of the device's alignment. What is over the judge's own budget is refused before that.
        let step = self.judge.device().properties().allocation_alignment;
        let refusal = |held: usize, bytes: usize, remaining| {
            let over = (held + bytes) as u64 > LIMIT;
            let requested = if over { bytes } else { bytes.next_multiple_of(step) };
            ResourceError::OutOfBudget { requested, remaining }
        };
        let state = || self.judge.ledger_snapshot();
        assert_eq!(ask(free + 1), Err(refusal(0, free + 1, free)), "{:#?}", state());
        let other = self.judge.budget().unwrap().last_oom().unwrap().others.unwrap();
        assert_eq!(other.bytes as u64, used);
        let whole = free / step * step;
        if whole > 0 {
            let block = ask(whole).expect("what the living do not use is free");
            assert_eq!(ask(1), Err(refusal(whole, 1, free - whole)), "{:#?}", state());
            self.judge.deallocate(block).unwrap();
        }
        self.judge.reap_pending().unwrap();
        self.judge.ledger().ledger().unwrap().return_grant().unwrap();
        if let Some(row) = stopped {
            self.workers[row].signal(libc::SIGCONT);
        }
    }

    /// Everybody gives back what it has and ends well.
    fn dissolve(&mut self) {
        for row in 0..WORKERS {
            self.tell(row, QUIT);
        }
        for row in 0..WORKERS {
            let status = self.workers[row].wait();
            assert!(status.success(), "worker {row}: {status}");
            assert_eq!(self.cells.units(row), 0);
        }
        let left = self.judge.ledger_snapshot().unwrap().unwrap();
        assert_eq!((left.used(), left.granted(), left.slots.len()), (0, 0, 1), "{left:?}");
    }

    /// Whether the limit was met, readings saw it, Python took part, and processes died and stopped.
    fn has_met_everything(&self, rounds: u64, sight: &Sight) -> bool {
        sight.samples.load(Ordering::Relaxed) > rounds
            && sight.highest.load(Ordering::Relaxed) > LIMIT / 2
            && self.total(Field::Refused) > 0
            && (self.python.is_none() || self.cells.load(PYTHON, Field::Steps) > rounds)
            && self.counts.killed > 0
            && self.counts.stopped > 0
    }

    fn total(&self, field: Field) -> u64 {
        (0..WORKERS).map(|row| self.cells.load(row, field)).sum()
    }
}

#[derive(Debug, Default)]
struct Sight {
    samples: AtomicU64,
    highest: AtomicU64,
}

/// Adds up what the living really hold, over and over.
fn watch(cells: &Cells, done: &AtomicBool, sight: &Sight) {
    while !done.load(Ordering::Relaxed) {
        if let Some(sum) = cells.sum_of_living() {
            sight.samples.fetch_add(1, Ordering::Relaxed);
            sight.highest.fetch_max(sum * UNIT, Ordering::Relaxed);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn eight_processes_killed_and_stopped_never_hold_more_than_the_limit() {
    let begin = Instant::now();
    let device: DeviceSpec = match std::env::var("XLOG_TEST_DEVICE") {
        Ok(spec) => spec.parse().unwrap(),
        Err(_) => DeviceSpec::Sim,
    };
    let rounds = match std::env::var("XLOG_LEDGER_ROUNDS") {
        Ok(text) => text.parse().expect("XLOG_LEDGER_ROUNDS is a number"),
        Err(_) if device.is_simulated() => 60,
        Err(_) => 20,
    };
    let test = "eight_processes_killed_and_stopped_never_hold_more_than_the_limit";
    let _turn = turn(&device.to_string());
    let mut fleet = Fleet::new(seed(test), device);
    let (cells, done) = (fleet.cells.clone(), Arc::new(AtomicBool::new(false)));
    let sight = Arc::new(Sight::default());
    let eye = std::thread::spawn({
        let (done, sight) = (done.clone(), sight.clone());
        move || watch(&cells, &done, &sight)
    });
    let mut ran = 0;
    // On a busy machine it takes more rounds until everything that is to be judged has happened.
    while ran < rounds || (!fleet.has_met_everything(rounds, &sight) && begin.elapsed() < LONGEST) {
        ran += 1;
        let dead = fleet.disturb();
        fleet.judge(&dead);
        for row in dead {
            fleet.revive(row);
        }
    }
    fleet.dissolve();
    done.store(true, Ordering::Relaxed);
    eye.join().unwrap();
    let (steps, refused) = (fleet.total(Field::Steps), fleet.total(Field::Refused));
    let python = if fleet.python.is_some() { fleet.cells.load(PYTHON, Field::Steps) } else { 0 };
    println!(
        "{ran} rounds on {device} in {:.1?}: {steps} steps, {refused} refused, {} busy, {} samples, blocks took at \
         most {} of {LIMIT} bytes, {:?}; python: {python} steps",
        begin.elapsed(),
        fleet.total(Field::Busy),
        sight.samples.load(Ordering::Relaxed),
        sight.highest.load(Ordering::Relaxed),
        fleet.counts,
    );
    assert!(sight.highest.load(Ordering::Relaxed) <= LIMIT, "{sight:?}");
    assert!(fleet.has_met_everything(rounds, &sight), "within {LONGEST:?}: {sight:?}");
}
