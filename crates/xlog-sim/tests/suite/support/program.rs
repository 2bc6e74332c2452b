//! Random programs over streams: how they are written. `model` says what must come of them, `run` runs them.

use std::collections::HashMap;

use super::Random;
use super::model::Bits;

pub const MAX_BYTES: usize = 192;

#[derive(Clone, Debug)]
pub enum Step {
    Alloc {
        block: usize,
        stream: usize,
        bytes: usize,
        pool: usize,
    },
    Free {
        block: usize,
        stream: usize,
    },
    /// A kernel that mixes what it reads into what it writes.
    Work {
        stream: usize,
        reads: Vec<usize>,
        writes: Vec<usize>,
        salt: u8,
    },
    Memset {
        stream: usize,
        block: usize,
        value: u8,
    },
    Copy {
        stream: usize,
        to: usize,
        from: usize,
    },
    /// A host function that does nothing.
    Nothing {
        stream: usize,
    },
    Edge {
        from: usize,
        to: usize,
    },
    HostSync {
        stream: usize,
    },
    Hold {
        stream: usize,
    },
    ReleaseAll,
    /// A block of virtual memory begins: a host call.
    Map {
        block: usize,
        bytes: usize,
    },
    /// A block of virtual memory ends: a host call, which must have seen all work on it complete.
    Unmap {
        block: usize,
    },
    /// A pool gives back what it can.
    Trim {
        pool: usize,
        keep: u64,
    },
}

#[derive(Clone)]
pub struct Program {
    pub streams: usize,
    pub pools: usize,
    pub steps: Vec<Step>,
}

/// How a program comes about.
pub struct Shape {
    pub streams: usize,
    pub steps: usize,
    pub blocks: usize,
    pub gates: bool,
    /// Several, so that one of them is often empty.
    pub pools: usize,
    /// Whether pools are trimmed now and then.
    pub trims: bool,
    /// Whether some of the blocks are virtual memory.
    pub maps: bool,
}

/// Order as the generator sees it while it writes: a gate orders nothing before it is released.
#[derive(Default)]
struct Draft {
    tail: Vec<Bits>,
    host: Bits,
}

struct Live {
    /// The stream of its allocation; `None` for virtual memory.
    home: Option<usize>,
    /// Steps that the next writer must follow, with their streams.
    writes: Vec<(usize, usize)>,
    reads: Vec<(usize, usize)>,
}

impl Program {
    /// A program in which every needed order is there.
    pub fn well_ordered(random: &mut Random, shape: &Shape) -> Self {
        let mut steps: Vec<Step> = Vec::new();
        let mut draft = Draft { tail: vec![Bits::default(); shape.streams], host: Bits::default() };
        let mut live: HashMap<usize, Live> = HashMap::new();
        let mut ids: Vec<usize> = Vec::new();
        let mut next_block = 0;
        let mut held = vec![false; shape.streams];
        while steps.len() < shape.steps {
            let stream = random.below(shape.streams);
            let roll = random.below(100);
            if ids.len() < 2 || (roll < 15 && ids.len() < shape.blocks) {
                let block = next_block;
                next_block += 1;
                let bytes = 1 + random.below(MAX_BYTES);
                if shape.maps && random.chance(15) {
                    steps.push(Step::Map { block, bytes });
                    live.insert(block, Live { home: None, writes: vec![], reads: vec![] });
                } else {
                    let (pool, at) = (random.below(shape.pools), steps.len());
                    draft.step(&mut steps, stream, Step::Alloc { block, stream, bytes, pool });
                    let writes = vec![(at, stream)];
                    live.insert(block, Live { home: Some(stream), writes, reads: vec![] });
                }
                ids.push(block);
            } else if roll < 27 {
                let block = ids.swap_remove(random.below(ids.len()));
                let needed = all(&live[&block]);
                match live.remove(&block).and_then(|block| block.home) {
                    Some(home) => {
                        // A free may come on any stream, mostly its own.
                        let stream = if random.chance(70) { home } else { stream };
                        draft.order(&mut steps, random, &mut held, stream, needed);
                        draft.step(&mut steps, stream, Step::Free { block, stream });
                    }
                    None => {
                        for (step, stream) in needed {
                            if !draft.host.has(step) {
                                draft.host_sync(&mut steps, &mut held, stream);
                            }
                        }
                        steps.push(Step::Unmap { block });
                    }
                }
            } else if roll < 75 {
                let (mut reads, mut writes) = (Vec::new(), Vec::new());
                for &block in &ids {
                    match random.below(ids.len().max(4)) {
                        0 => writes.push(block),
                        1 | 2 => reads.push(block),
                        _ => {}
                    }
                }
                if writes.is_empty() && reads.is_empty() {
                    continue;
                }
                let needed = reads
                    .iter()
                    .flat_map(|block| live[block].writes.clone())
                    .chain(writes.iter().flat_map(|block| all(&live[block])))
                    .collect();
                draft.order(&mut steps, random, &mut held, stream, needed);
                let at = steps.len();
                for block in &reads {
                    live.get_mut(block).unwrap().reads.push((at, stream));
                }
                for block in &writes {
                    let block = live.get_mut(block).unwrap();
                    (block.writes, block.reads) = (vec![(at, stream)], Vec::new());
                }
                let salt = random.next_u64() as u8;
                draft.step(&mut steps, stream, Step::Work { stream, reads, writes, salt });
            } else if roll < 82 {
                let block = ids[random.below(ids.len())];
                draft.order(&mut steps, random, &mut held, stream, all(&live[&block]));
                let at = steps.len();
                let target = live.get_mut(&block).unwrap();
                (target.writes, target.reads) = (vec![(at, stream)], Vec::new());
                let value = random.next_u64() as u8;
                draft.step(&mut steps, stream, Step::Memset { stream, block, value });
            } else if roll < 89 {
                let to = ids[random.below(ids.len())];
                let from = ids[random.below(ids.len())];
                if to == from {
                    continue;
                }
                let mut needed = all(&live[&to]);
                needed.extend(live[&from].writes.clone());
                draft.order(&mut steps, random, &mut held, stream, needed);
                let at = steps.len();
                live.get_mut(&from).unwrap().reads.push((at, stream));
                let target = live.get_mut(&to).unwrap();
                (target.writes, target.reads) = (vec![(at, stream)], Vec::new());
                draft.step(&mut steps, stream, Step::Copy { stream, to, from });
            } else if roll < 93 {
                draft.step(&mut steps, stream, Step::Nothing { stream });
            } else if roll < 95 && shape.gates && !held[stream] {
                held[stream] = true;
                draft.step(&mut steps, stream, Step::Hold { stream });
            } else if roll < 97 && held.iter().any(|&h| h) {
                held.fill(false);
                steps.push(Step::ReleaseAll);
            } else if roll < 98 {
                draft.host_sync(&mut steps, &mut held, stream);
            } else if shape.trims {
                let keep = [0, 0, 48 << 20][random.below(3)];
                steps.push(Step::Trim { pool: random.below(shape.pools), keep });
            }
        }
        steps.push(Step::ReleaseAll);
        Self { streams: shape.streams, pools: shape.pools, steps }
    }

    /// The same program without one step.
    pub fn without(&self, step: usize) -> Self {
        let mut program = self.clone();
        program.steps.remove(step);
        program
    }

    /// The steps that only order others.
    pub fn dependencies(&self) -> Vec<usize> {
        let orders = |step: &Step| matches!(step, Step::Edge { .. } | Step::HostSync { .. });
        (0..self.steps.len()).filter(|&i| orders(&self.steps[i])).collect()
    }
}

fn all(live: &Live) -> Vec<(usize, usize)> {
    live.writes.iter().chain(&live.reads).copied().collect()
}

impl Draft {
    fn step(&mut self, steps: &mut Vec<Step>, stream: usize, step: Step) {
        let host = self.host.clone();
        self.tail[stream].join(&host);
        self.tail[stream].set(steps.len());
        steps.push(step);
    }

    fn host_sync(&mut self, steps: &mut Vec<Step>, held: &mut [bool], stream: usize) {
        // A host that waits for a closed gate waits for ever.
        if held.iter().any(|&h| h) {
            held.fill(false);
            steps.push(Step::ReleaseAll);
        }
        let tail = self.tail[stream].clone();
        self.host.join(&tail);
        steps.push(Step::HostSync { stream });
    }

    /// Orders `stream` after the steps it needs, and never more often than it must.
    fn order(
        &mut self,
        steps: &mut Vec<Step>,
        random: &mut Random,
        held: &mut [bool],
        stream: usize,
        needed: Vec<(usize, usize)>,
    ) {
        for (step, home) in needed {
            if self.tail[stream].has(step) || self.host.has(step) {
                continue;
            }
            if random.chance(6) {
                self.host_sync(steps, held, home);
            } else {
                let from = self.tail[home].clone();
                self.tail[stream].join(&from);
                let host = self.host.clone();
                self.tail[stream].join(&host);
                self.tail[stream].set(steps.len());
                steps.push(Step::Edge { from: home, to: stream });
            }
        }
    }
}
