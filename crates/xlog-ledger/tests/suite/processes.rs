//! Eight processes under one limit, one of them Python, while others are killed and stopped in the middle.
//!
//! A watching process adds up what they really hold. After each round everybody pauses, and what is free must be
//! exactly the limit less what the living hold or are guaranteed: to be had in one request, dead and stopped ones notwithstanding.
//! Quotas change while their processes run; each process checks that it never gets more.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use xlog_ledger::{Ledger, LedgerError, Quota, UNIT};

use crate::cells::{
    Cells, Field, HIGHEST, HOLD, MONITOR, PAUSE, QUIT, RUN, SAMPLES, VIOLATIONS, WORKERS,
};
use crate::support::{
    Process, Random, TestDirectory, python, python_client, role_command, seed, wait_until,
};
use crate::worker::{LIMIT, LOCK_DEADLINE};

const ROUNDS: u64 = 200;
/// How long rounds go on until everything that is to be judged has happened.
const LONGEST: Duration = Duration::from_secs(300);
/// The row of the Python process.
const PYTHON: usize = WORKERS - 1;

struct Fleet {
    directory: TestDirectory,
    cells: Cells,
    workers: Vec<Process>,
    monitor: Process,
    ledger: Ledger,
    python: Option<PathBuf>,
    random: Random,
    commands: u64,
    counts: Counts,
    /// What is guaranteed to each worker, in units.
    guaranteed: [u64; WORKERS],
}

#[derive(Debug, Default)]
struct Counts {
    killed: u64,
    killed_holding_the_lock: u64,
    stopped: u64,
    stopped_holding_the_lock: u64,
    quotas_set: u64,
    dead_units_regained: u64,
}

impl Fleet {
    fn new(seed: u64) -> Self {
        let directory = TestDirectory::new();
        let cells = Cells::create(&directory.path().join("cells"));
        let config = directory.config(LIMIT).with_lock_deadline(LOCK_DEADLINE).with_name("judge");
        let ledger = Ledger::open(config).unwrap();
        let monitor = Process::spawn(role_command("watch", directory.path()));
        let mut fleet = Self {
            directory,
            cells,
            workers: Vec::new(),
            monitor,
            ledger,
            python: python(),
            random: Random::new(seed),
            commands: 0,
            counts: Counts::default(),
            guaranteed: [0; WORKERS],
        };
        for row in 0..WORKERS {
            let process = fleet.spawn(row);
            fleet.workers.push(process);
        }
        fleet
    }

    fn spawn(&mut self, row: usize) -> Process {
        let seed = self.random.next_u64();
        let mut command = match &self.python {
            Some(python) if row == PYTHON => {
                let manifest = env!("CARGO_MANIFEST_DIR");
                let mut command = Command::new(python);
                command
                    .arg(format!("{manifest}/tests/suite/worker.py"))
                    .arg(self.directory.ledger_path())
                    .arg(self.directory.path().join("cells"))
                    .args([row.to_string(), seed.to_string()])
                    .env("PYTHONPATH", python_client())
                    .env("PYTHONDONTWRITEBYTECODE", "1");
                command
            }
            _ => role_command("work", self.directory.path()),
        };
        command.env("XLOG_LEDGER_ROW", row.to_string()).env("XLOG_LEDGER_SEED", seed.to_string());
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

    /// Kills a worker. From the sentence on, what it holds is not counted: the kernel takes it.
    fn kill(&mut self, row: usize) {
        self.cells.store(row, Field::Doomed, 1);
        self.workers[row].kill();
        self.counts.killed += 1;
        self.counts.dead_units_regained += self.cells.units(row);
        self.guaranteed[row] = 0;
    }

    /// Gives a worker another quota while it runs, or none. What the worker is shown is never below what holds.
    fn set_a_quota(&mut self) {
        let row = self.any();
        let pid = self.workers[row].pid();
        let shown = self.ledger.snapshot().unwrap();
        let Some(slot) = shown.slots.iter().find(|slot| slot.alive && slot.pid == pid) else {
            return;
        };
        let units =
            (self.random.below_u64(3) > 0).then(|| LIMIT / 64 + self.random.below_u64(LIMIT / 4));
        let guaranteed = self.random.below_u64(LIMIT / 64);
        let mut quota = Quota::default().with_guaranteed(guaranteed * UNIT).with_name("a quota");
        quota.limit = units.map(|units| units * UNIT);
        let before = self.cells.load(row, Field::Quota);
        let changed = ((before >> 32) + 1) << 32;
        // Only what stays the same is judged by the worker.
        self.cells.store(row, Field::Quota, changed);
        match self.ledger.set_quota_of(slot, &quota) {
            Ok(()) => {
                self.counts.quotas_set += 1;
                self.guaranteed[row] = guaranteed;
                let stored = units.map_or(0, |units| units + 1);
                self.cells.store(row, Field::Quota, changed + (1 << 32) + stored);
            }
            Err(LedgerError::Busy { .. }) => {
                self.cells.store(row, Field::Quota, changed + (before & u64::from(u32::MAX)));
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// A new process in the place of a dead one.
    fn revive(&mut self, row: usize) {
        self.cells.store(row, Field::Quota, 0);
        let changes = self.cells.load(row, Field::Truth) >> 32;
        self.cells.store(row, Field::Truth, (changes + 1) << 32);
        self.cells.store(row, Field::Doomed, 0);
        self.workers[row] = self.spawn(row);
    }

    fn pause(&mut self, microseconds: u64) {
        let microseconds = self.random.below_u64(microseconds);
        std::thread::sleep(Duration::from_micros(microseconds));
    }

    fn any(&mut self) -> usize {
        self.random.below_u64(WORKERS as u64) as usize
    }

    /// A process to kill: seldom Python, which takes long to start.
    fn any_to_kill(&mut self) -> usize {
        let row = self.any();
        if row == PYTHON && self.random.below_u64(4) != 0 { 0 } else { row }
    }

    /// Stops a worker that holds the file lock; others are told who it is. Then it goes on, or dies of it.
    fn stop_a_lock_holder(&mut self, dead: &mut Vec<usize>) {
        let row = self.any_to_kill();
        let command = self.tell(row, HOLD);
        self.await_answer(row, command);
        self.workers[row].stop();
        // The holder stays stopped until this has returned: to wait for it would be to hang.
        match self.ledger.charge(UNIT) {
            Err(LedgerError::Busy { holder, .. }) => {
                assert_eq!(holder.map(|holder| holder.pid), Some(self.workers[row].pid()));
            }
            other => panic!("the lock is held, yet {other:?}"),
        }
        self.pause(5_000);
        if self.random.below_u64(2) == 0 {
            self.kill(row);
            dead.push(row);
            self.counts.killed_holding_the_lock += 1;
        } else {
            self.tell(row, RUN);
            self.workers[row].signal(libc::SIGCONT);
        }
        self.counts.stopped_holding_the_lock += 1;
    }

    /// Work, with some misfortune. Answers who died.
    fn disturb(&mut self) -> Vec<usize> {
        let mut dead = Vec::new();
        for row in 0..WORKERS {
            self.tell(row, RUN);
        }
        self.pause(50_000);
        for _ in 0..self.random.below_u64(3) {
            self.set_a_quota();
            self.pause(5_000);
        }
        if self.random.below_u64(2) == 0 {
            let row = self.any();
            self.workers[row].signal(libc::SIGSTOP);
            self.pause(10_000);
            self.workers[row].signal(libc::SIGCONT);
            self.counts.stopped += 1;
        }
        if self.random.below_u64(8) == 0 {
            self.stop_a_lock_holder(&mut dead);
        }
        if self.random.below_u64(2) == 0 {
            let row = self.any_to_kill();
            if !dead.contains(&row) {
                self.kill(row);
                dead.push(row);
            }
            self.pause(5_000);
        }
        dead
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
        let used: u64 = living.iter().map(|row| self.cells.units(*row)).sum();
        assert!(used <= LIMIT, "{used} of {LIMIT}");
        let reserved = |row: &usize| self.cells.units(*row).max(self.guaranteed[*row]);
        let free = LIMIT.saturating_sub(living.iter().map(reserved).sum()) * UNIT;
        if self.random.below_u64(2) == 0 {
            match self.ledger.charge(free + 1) {
                Err(LedgerError::Full { available, .. }) => assert_eq!(available, free),
                other => panic!("{} bytes are free, yet {other:?}", free),
            }
        }
        self.ledger.charge(free).expect("what the living do not use is free");
        assert!(matches!(self.ledger.charge(1), Err(LedgerError::Full { available: 0, .. })));
        self.ledger.release(free).unwrap();
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
        self.cells.store(MONITOR, Field::Command, QUIT);
        assert!(self.monitor.wait().success());
        let left = self.ledger.snapshot().unwrap();
        assert_eq!((left.used(), left.granted(), left.slots.len()), (0, 0, 1), "{left:?}");
    }

    /// Whether the limit was met, readings saw it, Python took part, and processes died and stopped.
    fn has_met_everything(&self, rounds: u64) -> bool {
        let monitor = |field| self.cells.load(MONITOR, field);
        let counts = &self.counts;
        monitor(SAMPLES) > rounds * 10
            && monitor(HIGHEST) > LIMIT * 9 / 10
            && self.total(Field::Refused) > rounds
            && (self.python.is_none() || self.cells.load(PYTHON, Field::Steps) > rounds)
            && [counts.killed, counts.stopped, counts.dead_units_regained].iter().all(|n| *n > 0)
            && counts.stopped_holding_the_lock > 0
            && counts.quotas_set > 0
    }

    fn total(&self, field: Field) -> u64 {
        (0..WORKERS).map(|row| self.cells.load(row, field)).sum()
    }
}

#[test]
fn eight_processes_killed_and_stopped_never_hold_more_than_the_limit() {
    let begin = Instant::now();
    let rounds = match std::env::var("XLOG_LEDGER_ROUNDS") {
        Ok(text) => text.parse().expect("XLOG_LEDGER_ROUNDS is a number"),
        Err(_) => ROUNDS,
    };
    let test = "eight_processes_killed_and_stopped_never_hold_more_than_the_limit";
    let mut fleet = Fleet::new(seed(test));
    let mut done = 0;
    // On a busy machine it takes more rounds until everything that is to be judged has happened.
    while done < rounds || (!fleet.has_met_everything(rounds) && begin.elapsed() < LONGEST) {
        done += 1;
        let dead = fleet.disturb();
        fleet.judge(&dead);
        for row in dead {
            fleet.revive(row);
        }
    }
    fleet.dissolve();
    let monitor = |field| fleet.cells.load(MONITOR, field);
    let (samples, highest) = (monitor(SAMPLES), monitor(HIGHEST));
    let (steps, refused) = (fleet.total(Field::Steps), fleet.total(Field::Refused));
    println!(
        "{done} rounds in {:.1?}: {steps} steps, {refused} refused, {} busy, {samples} samples, \
         at most {highest} of {LIMIT} units, {:?}; python: {} steps",
        begin.elapsed(),
        fleet.total(Field::Busy),
        fleet.counts,
        if fleet.python.is_some() { fleet.cells.load(PYTHON, Field::Steps) } else { 0 },
    );
    assert_eq!(monitor(VIOLATIONS), 0, "at most {highest} of {LIMIT} units");
    assert!(fleet.has_met_everything(rounds), "within {LONGEST:?}");
}
