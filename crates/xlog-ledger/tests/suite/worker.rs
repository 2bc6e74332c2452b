//! The processes of the multi-process test: those that take and give, and the one that watches.

use std::path::Path;
use std::time::Duration;

use xlog_ledger::{DeviceKey, Ledger, LedgerConfig, LedgerError, UNIT};

use crate::cells::{
    Cells, Field, HIGHEST, HOLD, MONITOR, PAUSE, QUIT, RUN, SAMPLES, Truth, VIOLATIONS, WORKERS,
};
use crate::support::{KEY, Random};

/// The shared limit, in units.
pub(crate) const LIMIT: u64 = 4096;
/// The largest request, in units.
const LARGEST: u64 = 1024;
/// Short, so that a stopped holder of the lock is met by many deadlines.
pub(crate) const LOCK_DEADLINE: Duration = Duration::from_millis(10);

fn number(variable: &str) -> u64 {
    std::env::var(variable).unwrap().parse().unwrap()
}

fn wait_for_another(cells: &Cells, row: usize, command: u64) {
    while cells.load(row, Field::Command) == command {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Takes and gives at random until told otherwise.
pub(crate) fn work(directory: &Path) {
    let cells = Cells::open(&directory.join("cells"));
    let row = number("XLOG_LEDGER_ROW") as usize;
    let mut random = Random::new(number("XLOG_LEDGER_SEED"));
    let ledger = attach(directory, &cells, row);
    let mut truth = Truth::new(&cells, row);
    let mut held = Vec::new();
    loop {
        let command = cells.load(row, Field::Command);
        match command & 0xff {
            RUN => {
                cells.store(row, Field::Answer, command);
                step(&ledger, &cells, row, &mut random, &mut truth, &mut held);
                if random.below_u64(2) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below_u64(100)));
                }
            }
            PAUSE => {
                cells.store(row, Field::Answer, command);
                wait_for_another(&cells, row, command);
            }
            HOLD => match ledger.hold_file_lock() {
                Ok(_lock) => {
                    cells.store(row, Field::Answer, command);
                    wait_for_another(&cells, row, command);
                }
                Err(LedgerError::Busy { .. }) => cells.add(row, Field::Busy, 1),
                Err(error) => panic!("{error}"),
            },
            QUIT => break,
            other => panic!("no command {other}"),
        }
    }
    for bytes in held {
        give(&ledger, &mut truth, bytes);
    }
    assert_eq!((ledger.used(), truth.units()), (0, 0));
}

fn attach(directory: &Path, cells: &Cells, row: usize) -> Ledger {
    loop {
        let config = LedgerConfig::new(DeviceKey::new(KEY).unwrap())
            .with_directory(directory)
            .with_chunk(128 * UNIT)
            .with_lock_deadline(LOCK_DEADLINE)
            .with_name(format!("worker {row}"));
        match Ledger::open(config) {
            Ok(ledger) => return ledger,
            Err(LedgerError::Busy { .. }) => cells.add(row, Field::Busy, 1),
            Err(error) => panic!("{error}"),
        }
    }
}

fn step(
    ledger: &Ledger,
    cells: &Cells,
    row: usize,
    random: &mut Random,
    truth: &mut Truth<'_>,
    held: &mut Vec<u64>,
) {
    cells.add(row, Field::Steps, 1);
    if held.is_empty() || random.below_u64(20) < 11 {
        // Many small requests, which the grant serves, and some large ones.
        let largest = if random.below_u64(3) == 0 { LARGEST } else { LARGEST / 32 };
        let bytes = 1 + random.below_u64(largest * UNIT);
        let quota = cells.load(row, Field::Quota);
        match ledger.charge(bytes) {
            Ok(()) => {
                truth.set(truth.units() + bytes.div_ceil(UNIT));
                held.push(bytes);
                // One that did not change during the call holds for it.
                if quota & u64::from(u32::MAX) != 0 && quota == cells.load(row, Field::Quota) {
                    let units = (quota & u64::from(u32::MAX)) - 1;
                    assert!(
                        truth.units() <= units,
                        "{} units above the quota {units}",
                        truth.units()
                    );
                }
            }
            Err(LedgerError::Full { .. } | LedgerError::OverQuota { .. }) => {
                cells.add(row, Field::Refused, 1)
            }
            Err(LedgerError::Busy { .. }) => cells.add(row, Field::Busy, 1),
            Err(error) => panic!("{error}"),
        }
    } else {
        let index = random.below_u64(held.len() as u64) as usize;
        give(ledger, truth, held.swap_remove(index));
    }
}

fn give(ledger: &Ledger, truth: &mut Truth<'_>, bytes: u64) {
    truth.set(truth.units() - bytes.div_ceil(UNIT));
    ledger.release(bytes).unwrap();
}

/// Adds up what the workers really hold, over and over.
///
/// A sum is counted only if two readings of all cells agree: each cell carries the number of its changes, so all of
/// them then stood still between the two.
pub(crate) fn watch(directory: &Path) {
    let cells = Cells::open(&directory.join("cells"));
    let read = || -> Vec<(u64, u64)> {
        (0..WORKERS)
            .map(|row| (cells.load(row, Field::Truth), cells.load(row, Field::Doomed)))
            .collect()
    };
    let mut highest = 0;
    while cells.load(MONITOR, Field::Command) != QUIT {
        let first = read();
        if first == read() {
            let living = first.iter().filter(|(_, doomed)| *doomed == 0);
            let sum: u64 = living.map(|(truth, _)| truth & u64::from(u32::MAX)).sum();
            highest = highest.max(sum);
            cells.add(MONITOR, SAMPLES, 1);
            cells.store(MONITOR, HIGHEST, highest);
            if sum > LIMIT {
                cells.add(MONITOR, VIOLATIONS, 1);
            }
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}
