//! Relations that grow to a fixed point.
//!
//! Two threads with two streams each. A script is one stratum. Each round joins the new facts with the full relation, sorts the
//! result, removes duplicates and known facts, and rebuilds the full relation. The number of new facts grows and then
//! declines, so sizes vary between rounds and the largest blocks are replaced constantly.

use super::{LaneId, Minstd, Model, Script, scaled};
use crate::{Sizes, draw_size};

#[derive(Debug)]
pub(super) struct Datalog {
    scale: f64,
}

impl Datalog {
    pub(super) fn new(scale: f64) -> Self {
        Self { scale }
    }
}

impl Model for Datalog {
    fn lanes(&self) -> Vec<LaneId> {
        (0..4).map(|lane| LaneId { thread: 1 + lane / 2, stream: lane as u32 + 1 }).collect()
    }

    fn keep_bytes(&self) -> u64 {
        scaled(512 << 20, self.scale)
    }

    fn script(&mut self, random: &mut Minstd) -> Script {
        let mut script = Script::default();
        let columns = random.draw(2, 4);
        let width = columns * 4;
        let most = scaled(400_000, self.scale).max(2_000);
        let base = draw_size(random, Sizes::LogUniform, 1_000, most);
        let mut facts = base;
        let mut fresh = base;
        let mut full = script.allocate(facts * width, "relation full");
        let mut delta = script.allocate(fresh * width, "relation delta");
        let rounds = random.draw(4, 30);
        for round in 0..rounds {
            let index = script.allocate((fresh * 2).next_power_of_two() * 8, "join index");
            let counts = script.allocate(fresh * 4, "join counts");
            let offsets = script.allocate(fresh * 8, "join offsets");
            let total = script.allocate(8, "join total");
            script.work(facts / 16 + 5_000);
            // The growth is higher in the first third of the rounds.
            let growth =
                if round * 3 < rounds { random.draw(90, 220) } else { random.draw(30, 90) };
            let joined = (fresh * growth / 100).max(1);
            let output = script.allocate(joined * width, "join output");
            script.free_all([counts, offsets, index]);
            script.free(total);

            let scratch = script.allocate(joined * width + 16_384, "sort scratch");
            let flags = script.allocate(joined, "duplicate flags");
            script.work(joined / 2 + 5_000);
            script.free(scratch);
            fresh = (joined * random.draw(20, 95) / 100).max(1);
            let next = script.allocate(fresh * width, "relation delta");
            script.free_all([flags, output, delta]);
            delta = next;

            facts += fresh;
            let merged = script.allocate(facts * width, "relation full");
            script.work(facts / 8);
            script.free(full);
            full = merged;
        }
        script.free(delta);
        script.keep(full);
        script
    }
}
