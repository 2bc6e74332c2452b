//! Random programs under a guard: what was planted is reported, as it was planted; a clean program is not reported at all.
//!
//! The test keeps a model of the quarantine, which the guard must agree with to the byte after every step, and so knows which
//! freed blocks can still be written. A failing seed is printed; `XLOG_GUARD_SEED` runs it alone.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    BlockId, BlockState, DamageKind, DeviceBlock, DeviceMemoryResource, GuardConfig, ResourceError,
    ResourceResult, StreamLease,
};

use xlog_testing::turn;

use crate::support::{Random, Replay, Rig, gpu, poke, quiet, seeds};

const STEPS: usize = 18;

/// A block that the program has, or had.
struct Known {
    block: Option<DeviceBlock>,
    id: BlockId,
    bytes: usize,
    home: usize,
    /// Before and behind it.
    canaries: (usize, usize),
    hit: [bool; 2],
}

/// Where damage is due: generation, kind, first offset, damaged bytes.
type Damage = (u64, bool, i64, u64);

struct Program {
    rig: Rig,
    streams: Vec<StreamLease>,
    random: Random,
    config: GuardConfig,
    blocks: Vec<Known>,
    /// Places in `blocks`, the oldest first, and their charges.
    quarantine: VecDeque<(usize, usize)>,
    planted: BTreeSet<Damage>,
    returned: Vec<ResourceError>,
}

fn front_of(canary: usize) -> usize {
    canary.next_multiple_of(256)
}

impl Program {
    fn new(device: &Arc<CudaDevice>, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let canary = [1, 16, 100, 256, 300][random.below(5)];
        let most = [0, 1500, 4000, 1 << 20][random.below(4)];
        let blocks = [1, 3, 100][random.below(3)];
        let config = quiet().with_canary_bytes(canary).with_quarantine(most, blocks);
        let rig = Rig::new(device, config.clone());
        let streams = (0..2).map(|_| rig.pool.lease().unwrap()).collect();
        Self {
            rig,
            streams,
            random,
            config,
            blocks: Vec::new(),
            quarantine: VecDeque::new(),
            planted: BTreeSet::new(),
            returned: Vec::new(),
        }
    }

    fn run(mut self, plants: bool) {
        for _ in 0..STEPS {
            match self.random.below(if plants { 13 } else { 10 }) {
                0..=2 => self.allocate(),
                3..=4 => self.write(),
                5..=6 => self.free(),
                7 => {
                    let reaped = self.rig.guard.reap_completed();
                    self.note(reaped);
                }
                8 => {
                    let checked = self.rig.guard.check_now();
                    self.note(checked);
                }
                9 => self.wait_across(),
                10 => self.damage_live(),
                11 => self.run_over(),
                _ => self.damage_freed(),
            }
            self.compare();
        }
        self.finish();
    }

    fn note(&mut self, result: ResourceResult<()>) {
        if let Err(error) = result {
            let is_damage = matches!(
                error,
                ResourceError::OutOfBounds { .. } | ResourceError::UseAfterFree { .. }
            );
            assert!(is_damage, "{error}");
            self.returned.push(error);
        }
    }

    fn allocate(&mut self) {
        let (bytes, home) = (1 + self.random.below(700), self.random.below(2));
        let block = self.rig.allocate(bytes, &self.streams[home]);
        assert_eq!(block.bytes, bytes);
        let canary = self.config.canary_bytes;
        let id = BlockId::from_block(&block);
        let canaries = (front_of(canary), canary);
        let block = Some(block);
        self.blocks.push(Known { block, id, bytes, home, canaries, hit: [false; 2] });
    }

    fn pick_live(&mut self) -> Option<usize> {
        let live: Vec<usize> =
            (0..self.blocks.len()).filter(|&n| self.blocks[n].block.is_some()).collect();
        (!live.is_empty()).then(|| live[self.random.below(live.len())])
    }

    fn write(&mut self) {
        let Some(n) = self.pick_live() else { return };
        let known = &self.blocks[n];
        let from = self.random.below(known.bytes);
        let count = 1 + self.random.below(known.bytes - from);
        let stream = self.random.below(2);
        self.rig.write(known.id, &self.streams[stream], from as i64, 0xc7, count);
    }

    fn charge(&self, known: &Known) -> usize {
        known.bytes + known.canaries.0 + known.canaries.1
    }

    fn free(&mut self) {
        let Some(n) = self.pick_live() else { return };
        let block = self.blocks[n].block.take().unwrap();
        self.rig.guard.deallocate(block).unwrap();
        let (charge, limit) = (self.charge(&self.blocks[n]), self.config.quarantine_bytes);
        if charge > limit {
            return;
        }
        let held = |quarantine: &VecDeque<(usize, usize)>| -> usize {
            quarantine.iter().map(|(_, charge)| charge).sum()
        };
        while held(&self.quarantine) + charge > limit
            || self.quarantine.len() >= self.config.quarantine_blocks
        {
            self.quarantine.pop_front();
        }
        self.quarantine.push_back((n, charge));
    }

    /// Each stream follows the other, as far as it has come.
    fn wait_across(&mut self) {
        self.streams[0].wait_for(&self.streams[1]).unwrap();
        self.streams[1].wait_for(&self.streams[0]).unwrap();
    }

    fn plant(&mut self, n: usize, freed: bool, offset: i64, count: usize) {
        let known = &mut self.blocks[n];
        let hit = &mut known.hit[usize::from(freed)];
        if *hit {
            return;
        }
        *hit = true;
        poke(&self.streams[known.home], known.id.ptr, offset, self.random.below(0x80) as u8, count);
        self.planted.insert((known.id.generation.0, freed, offset, count as u64));
    }

    /// Bytes before or behind a block.
    fn plant_around(&mut self, n: usize) {
        let Known { bytes, canaries: (front, back), .. } = self.blocks[n];
        let before = self.random.below(2) == 0;
        let zone = if before { front } else { back };
        let at = self.random.below(zone);
        let count = 1 + self.random.below((zone - at).min(20));
        let offset = if before { at as i64 - front as i64 } else { (bytes + at) as i64 };
        self.plant(n, false, offset, count);
    }

    fn damage_live(&mut self) {
        if let Some(n) = self.pick_live() {
            self.plant_around(n);
        }
    }

    /// An announced write, on any stream, that does not stop where it should.
    fn run_over(&mut self) {
        let Some(n) = self.pick_live() else { return };
        let known = &mut self.blocks[n];
        if std::mem::replace(&mut known.hit[0], true) {
            return;
        }
        let from = self.random.below(known.bytes);
        let beyond = 1 + self.random.below(known.canaries.1);
        let stream = &self.streams[self.random.below(2)];
        self.rig.write(known.id, stream, from as i64, 0x3c, known.bytes - from + beyond);
        let due = (known.id.generation.0, false, known.bytes as i64, beyond as u64);
        self.planted.insert(due);
    }

    /// A block in the quarantine: in it, or around it.
    fn damage_freed(&mut self) {
        if self.quarantine.is_empty() {
            return;
        }
        let (n, _) = self.quarantine[self.random.below(self.quarantine.len())];
        if self.random.below(4) == 0 {
            return self.plant_around(n);
        }
        let bytes = self.blocks[n].bytes;
        let from = self.random.below(bytes);
        let count = 1 + self.random.below((bytes - from).min(20));
        self.plant(n, true, from as i64, count);
    }

    /// The guard and the model agree.
    fn compare(&self) {
        let bytes: usize = self.quarantine.iter().map(|(_, charge)| charge).sum();
        assert_eq!(self.rig.guard.quarantine(), (bytes, self.quarantine.len()));
        assert!(bytes <= self.config.quarantine_bytes);
        let live = self.blocks.iter().filter(|known| known.block.is_some());
        let live: usize = live.map(|known| self.charge(known)).sum();
        let counted = self.rig.guard.bytes_outstanding();
        assert!(counted >= live + bytes, "{counted} of {live} live and {bytes} held bytes");
        for (n, known) in self.blocks.iter().enumerate() {
            let held = self.quarantine.iter().any(|(at, _)| *at == n);
            let state = self.rig.guard.block_state(known.id);
            let due: &[BlockState] = match (known.block.is_some(), held) {
                (true, _) => &[BlockState::Live],
                (_, true) => &[BlockState::Retired, BlockState::Quarantined],
                (_, false) => &[BlockState::Retired, BlockState::Freed],
            };
            assert!(due.contains(&state), "{state:?} is none of {due:?}");
        }
    }

    fn finish(mut self) {
        while self.pick_live().is_some() {
            self.free();
        }
        self.compare();
        self.rig.guard.flush_quarantine().unwrap();
        loop {
            let before = self.returned.len();
            let reaped = self.rig.guard.reap_pending();
            self.note(reaped);
            if self.returned.len() == before {
                break;
            }
        }
        assert_eq!(self.rig.guard.bytes_outstanding(), 0);
        let reports = self.rig.guard.reports();
        let found: BTreeSet<Damage> = reports
            .iter()
            .map(|r| (r.generation.0, r.kind == DamageKind::UseAfterFree, r.offset, r.damaged))
            .collect();
        assert_eq!(found, self.planted, "{reports:#?}");
        let mut returned: Vec<String> = self.returned.iter().map(ToString::to_string).collect();
        let mut due: Vec<String> = reports.iter().map(|r| r.error().to_string()).collect();
        returned.sort_unstable();
        due.sort_unstable();
        assert_eq!(returned, due, "every report is returned once");
        let races = self.rig.device.races();
        assert!(races.is_empty(), "{races:#?}");
    }
}

fn run_all(plants: bool) {
    for seed in seeds(5000, 40) {
        let _replay = Replay(seed);
        let spec = gpu().unwrap_or_else(|| format!("sim:{seed}"));
        let _turn = turn(&spec);
        let device = Arc::new(CudaDevice::open(&spec).unwrap());
        Program::new(&device, seed).run(plants);
    }
}

#[test]
fn every_planted_damage_is_reported_where_it_was_planted() {
    run_all(true);
}

#[test]
fn clean_programs_are_not_reported() {
    run_all(false);
}
