//! One process of the multi-process test: the shared runtime of its device, as the environment configures it.

use std::path::PathBuf;
use std::time::Duration;

use xlog_cuda::device_runtime::{
    AllocTag, DeviceBlock, LedgerStatus, ResourceError, RuntimeConfig, XlogDeviceRuntime,
};
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::{CudaDevice, DeviceSpec, StreamId};

use crate::cells::{Cells, Field, HOLD, PAUSE, QUIT, RUN, Truth};
use crate::support::Random;

const TAG: AllocTag = AllocTag("worker");
/// The largest request.
pub(crate) const LARGEST: u64 = 12 << 20;
/// Short, so that a stopped holder of the lock is met by many deadlines.
pub(crate) const LOCK_DEADLINE: Duration = Duration::from_millis(20);

fn number(variable: &str) -> u64 {
    std::env::var(variable).unwrap().parse().unwrap()
}

struct Worker<'a> {
    runtime: &'static XlogDeviceRuntime,
    cells: &'a Cells,
    row: usize,
    random: Random,
    truth: Truth<'a>,
    held: Vec<(DeviceBlock, u8)>,
}

#[test]
#[ignore = "a role of another test, which starts it as a process of its own"]
fn role() {
    let directory =
        PathBuf::from(std::env::var_os("XLOG_FLEET_DIRECTORY").expect("started by a test"));
    let cells = Cells::open(&directory.join("cells"));
    let row = number("XLOG_FLEET_ROW") as usize;
    let mut worker = Worker {
        runtime: join(&cells, row),
        cells: &cells,
        row,
        random: Random::new(number("XLOG_FLEET_SEED")),
        truth: Truth::new(&cells, row),
        held: Vec::new(),
    };
    loop {
        let command = cells.load(row, Field::Command);
        match command & 0xff {
            RUN => {
                cells.store(row, Field::Answer, command);
                worker.step();
            }
            PAUSE => {
                cells.store(row, Field::Physical, worker.physical());
                cells.store(row, Field::Answer, command);
                wait_for_another(&cells, row, command);
            }
            HOLD => worker.hold_the_lock(command),
            QUIT => break,
            other => panic!("no command {other}"),
        }
    }
    worker.leave();
}

/// The singleton, as the environment says. A stopped holder of the file lock is waited out.
fn join(cells: &Cells, row: usize) -> &'static XlogDeviceRuntime {
    let config = RuntimeConfig::from_environment().unwrap().with_ledger_deadline(LOCK_DEADLINE);
    let ordinal = match CudaDevice::default_spec().unwrap() {
        DeviceSpec::Cuda(ordinal) => ordinal as u32,
        _ => 0,
    };
    XlogDeviceRuntime::configure(ordinal, config).unwrap();
    loop {
        match XlogDeviceRuntime::try_get(ordinal) {
            Ok(runtime) => return runtime,
            Err(error) if error.to_string().contains("file lock") => cells.add(row, Field::Busy, 1),
            Err(error) => panic!("{error}"),
        }
    }
}

fn wait_for_another(cells: &Cells, row: usize, command: u64) {
    while cells.load(row, Field::Command) == command {
        std::thread::sleep(Duration::from_micros(500));
    }
}

fn units(block: &DeviceBlock) -> i64 {
    block.bytes.div_ceil(256) as i64
}

/// What a driver pool grows by.
const STEP: u64 = 32 << 20;

impl Worker<'_> {
    fn step(&mut self) {
        self.cells.add(self.row, Field::Steps, 1);
        if self.held.is_empty() || self.random.below_u64(20) < 11 {
            let largest = if self.random.below_u64(3) == 0 { LARGEST } else { LARGEST / 16 };
            let bytes = 1 + self.random.below_u64(largest) as usize;
            match self.runtime.allocate(bytes, StreamId::DEFAULT, TAG) {
                Ok(block) => {
                    self.truth.add(units(&block));
                    self.keep(block);
                }
                // A process that holds most of its budget may have its free memory in pieces.
                Err(ResourceError::OutOfBudget { .. } | ResourceError::OutOfMemory { .. }) => {
                    self.cells.add(self.row, Field::Refused, 1)
                }
                Err(ResourceError::Ledger(said)) if said.contains("file lock") => {
                    self.cells.add(self.row, Field::Busy, 1);
                }
                Err(error) => panic!("{error}"),
            }
        } else {
            let index = self.random.below_u64(self.held.len() as u64) as usize;
            let (block, mark) = self.held.swap_remove(index);
            self.free(block, mark);
        }
        if self.random.below_u64(64) == 0 {
            self.runtime.trim().unwrap();
        }
        if self.random.below_u64(2) == 0 {
            std::thread::sleep(Duration::from_micros(self.random.below_u64(200)));
        }
    }

    /// Marks both ends of a block, to be found there when it goes.
    fn keep(&mut self, block: DeviceBlock) {
        let mark = self.random.next_u64() as u8;
        let stream = self.runtime.stream_pool().resolve(StreamId::DEFAULT).unwrap();
        // SAFETY: the block is live, and everything is on its own stream.
        unsafe {
            stream.memset(block.ptr, mark, 1).unwrap();
            stream.memset(block.ptr + block.bytes as u64 - 1, mark, 1).unwrap();
        }
        self.held.push((block, mark));
    }

    fn free(&mut self, block: DeviceBlock, mark: u8) {
        let stream = self.runtime.stream_pool().resolve(StreamId::DEFAULT).unwrap();
        let (mut first, mut last) = ([0], [0]);
        // SAFETY: as above.
        unsafe {
            stream.copy_dtoh(&mut first, block.ptr).unwrap();
            stream.copy_dtoh(&mut last, block.ptr + block.bytes as u64 - 1).unwrap();
        }
        assert_eq!((first, last), ([mark], [mark]), "{block:?}");
        self.truth.add(-units(&block));
        self.runtime.deallocate(block).unwrap();
    }

    /// What this process holds of the card, by what the device says where it can: that is what the ledger must count.
    fn physical(&self) -> u64 {
        self.runtime.reap_pending().unwrap();
        // Another worker that still runs may ask for what is cached, and this one would answer while it pauses.
        self.runtime.trim().unwrap();
        let counted = || self.runtime.ledger_meter().unwrap().bytes();
        if let Some(held) = self.held_of_the_device() {
            // A driver pool may have grown unforeseen, by a step that the ledger refused: it goes as soon as it can, and on a GPU
            // that is not before the blocks that the driver put there are freed.
            if held > counted() {
                assert!(held - counted() <= STEP, "{held} held, {} counted", counted());
                self.runtime.trim().unwrap();
            }
            let held = self.held_of_the_device().unwrap_or(0);
            let is_gpu = self.runtime.device().properties().kind == DeviceKind::Cuda;
            let excess = held.checked_sub(counted()).expect("more is counted than is held");
            assert!(excess <= if is_gpu { STEP } else { 0 }, "{excess}: {:?}", self.runtime);
        }
        self.runtime.ledger().ledger().unwrap().used()
    }

    fn held_of_the_device(&self) -> Option<u64> {
        let device = self.runtime.device();
        if device.properties().kind == DeviceKind::Simulated {
            let memory = device.memory_info().unwrap();
            return Some(memory.total - memory.free);
        }
        // A GPU's memory is everybody's; its driver pool is this process's own.
        let is_async = std::env::var("XLOG_DEVICE_RESOURCE").unwrap() == "async";
        is_async.then(|| self.runtime.physical_bytes().unwrap() as u64)
    }

    fn hold_the_lock(&self, command: u64) {
        let LedgerStatus::Joined(ledger) = self.runtime.ledger() else { panic!("no ledger") };
        match ledger.hold_file_lock() {
            Ok(_lock) => {
                self.cells.store(self.row, Field::Answer, command);
                wait_for_another(self.cells, self.row, command);
            }
            Err(error) if error.to_string().contains("file lock") => {
                self.cells.add(self.row, Field::Busy, 1);
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Everything goes back.
    fn leave(mut self) {
        for (block, mark) in std::mem::take(&mut self.held) {
            self.free(block, mark);
        }
        self.runtime.device().synchronize().unwrap();
        self.runtime.reap_pending().unwrap();
        self.runtime.trim().unwrap();
        let meter = self.runtime.ledger_meter().unwrap();
        assert_eq!((meter.bytes(), meter.failed_releases(), self.truth.units()), (0, 0, 0));
        assert_eq!(meter.ledger().used(), 0);
        assert_eq!(self.runtime.budget().unwrap().reserved_bytes(), 0);
        assert!(self.runtime.device().races().is_empty());
    }
}
