//! What must come of a program. The model knows nothing of clocks: order is reachability in a graph of steps.

use std::collections::{BTreeMap, HashMap};

use xlog_sim::RaceKind;

use super::program::{Program, Step};

/// Ancestors of a step, as bits.
#[derive(Clone, Default, PartialEq)]
pub struct Bits(Vec<u64>);

impl Bits {
    pub fn set(&mut self, i: usize) {
        if self.0.len() <= i / 64 {
            self.0.resize(i / 64 + 1, 0);
        }
        self.0[i / 64] |= 1 << (i % 64);
    }

    pub fn has(&self, i: usize) -> bool {
        self.0.get(i / 64).is_some_and(|word| word >> (i % 64) & 1 == 1)
    }

    pub fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a |= b;
        }
    }
}

impl Program {
    /// Every pair of conflicting steps that the program does not order, with the kinds a report may have.
    pub fn races(&self) -> Vec<(usize, usize, RaceKind)> {
        let before = self.ancestors();
        let mut touched: HashMap<usize, Vec<(usize, Touch)>> = HashMap::new();
        let mut races = Vec::new();
        for (at, step) in self.steps.iter().enumerate() {
            for (block, touch) in touches(step) {
                let list = touched.entry(block).or_default();
                for &(earlier, what) in list.iter() {
                    let kind = match (what, touch) {
                        (Touch::Read, Touch::Read) => continue,
                        (_, Touch::Free) => RaceKind::UseAfterFree,
                        (_, Touch::Unmap) => RaceKind::UnmapUnderUse,
                        (Touch::Alloc, _) => RaceKind::UseBeforeAllocation,
                        (Touch::Write, Touch::Write) => RaceKind::WriteWrite,
                        _ => RaceKind::ReadWrite,
                    };
                    if !before[at].has(earlier) && !before[earlier].has(at) {
                        races.push((earlier, at, kind));
                    }
                }
                list.push((at, touch));
            }
        }
        races
    }

    /// For each step, everything that is ordered before it.
    fn ancestors(&self) -> Vec<Bits> {
        // A gate gets its order from a later step, so settle until nothing changes.
        let mut before = vec![Bits::default(); self.steps.len()];
        loop {
            let previous = before.clone();
            let mut tail: Vec<Option<usize>> = vec![None; self.streams];
            let mut host = Bits::default();
            let mut open: Vec<usize> = Vec::new();
            for (at, step) in self.steps.iter().enumerate() {
                let upto = |tail: Option<usize>, before: &[Bits]| {
                    let mut bits = Bits::default();
                    if let Some(tail) = tail {
                        bits.join(&before[tail]);
                        bits.set(tail);
                    }
                    bits
                };
                match step {
                    Step::HostSync { stream } => host.join(&upto(tail[*stream], &before)),
                    Step::ReleaseAll => {
                        for gate in open.drain(..) {
                            before[gate].join(&host);
                        }
                    }
                    Step::Unmap { .. } => before[at].join(&host),
                    Step::Map { .. } | Step::Trim { .. } => {}
                    Step::Edge { from, to } => {
                        // Both the record and the wait are made by a host that knows this much.
                        let mut bits = upto(tail[*from], &before);
                        bits.join(&upto(tail[*to], &before));
                        bits.join(&host);
                        before[at].join(&bits);
                        tail[*to] = Some(at);
                    }
                    Step::Alloc { stream, .. }
                    | Step::Free { stream, .. }
                    | Step::Work { stream, .. }
                    | Step::Memset { stream, .. }
                    | Step::Copy { stream, .. }
                    | Step::Nothing { stream }
                    | Step::Hold { stream } => {
                        let mut bits = upto(tail[*stream], &before);
                        bits.join(&host);
                        before[at].join(&bits);
                        tail[*stream] = Some(at);
                        if matches!(step, Step::Hold { .. }) {
                            open.push(at);
                        }
                    }
                }
            }
            if before == previous {
                return before;
            }
        }
    }

    /// What every live block holds at the end, in program order.
    pub fn expected(&self) -> BTreeMap<usize, Vec<u8>> {
        let mut blocks: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        for step in &self.steps {
            match step {
                Step::Alloc { block, bytes, .. } | Step::Map { block, bytes } => {
                    blocks.insert(*block, vec![0; *bytes]);
                }
                Step::Free { block, .. } | Step::Unmap { block } => {
                    blocks.remove(block);
                }
                Step::Work { reads, writes, salt, .. } => {
                    let inputs: Vec<Vec<u8>> = reads
                        .iter()
                        .filter(|block| !writes.contains(block))
                        .map(|block| blocks[block].clone())
                        .collect();
                    for block in writes {
                        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
                        mix(&inputs, *salt, blocks.get_mut(block).unwrap());
                    }
                }
                Step::Memset { block, value, .. } => blocks.get_mut(block).unwrap().fill(*value),
                Step::Copy { to, from, .. } => {
                    let bytes = blocks[to].len().min(blocks[from].len());
                    let source = blocks[from][..bytes].to_vec();
                    blocks.get_mut(to).unwrap()[..bytes].copy_from_slice(&source);
                }
                _ => {}
            }
        }
        blocks
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Touch {
    Alloc,
    Read,
    Write,
    Free,
    Unmap,
}

fn touches(step: &Step) -> Vec<(usize, Touch)> {
    match step {
        Step::Alloc { block, .. } => vec![(*block, Touch::Alloc)],
        Step::Free { block, .. } => vec![(*block, Touch::Free)],
        Step::Unmap { block } => vec![(*block, Touch::Unmap)],
        Step::Work { reads, writes, .. } => reads
            .iter()
            .filter(|block| !writes.contains(block))
            .map(|&block| (block, Touch::Read))
            .chain(writes.iter().map(|&block| (block, Touch::Write)))
            .collect(),
        Step::Memset { block, .. } => vec![(*block, Touch::Write)],
        Step::Copy { to, from, .. } => vec![(*to, Touch::Write), (*from, Touch::Read)],
        _ => Vec::new(),
    }
}

/// What a kernel does with its inputs.
pub fn mix(inputs: &[&[u8]], salt: u8, out: &mut [u8]) {
    for (i, byte) in out.iter_mut().enumerate() {
        let mut value = byte.wrapping_mul(3).wrapping_add(salt).wrapping_add(i as u8);
        for input in inputs {
            value = value.rotate_left(1) ^ input[i % input.len()];
        }
        *byte = value;
    }
}
