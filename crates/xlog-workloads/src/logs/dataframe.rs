//! Queries over columns.
//!
//! Four threads, each with a stream. A query loads columns with their validity bits, filters them by a mask, joins through a
//! hash table or sorts, aggregates, and keeps its result among the latest ones. Temporaries are not freed in the order of
//! their allocation.

use super::{LaneId, Minstd, Model, Script, scaled};
use crate::{Sizes, draw_size};

#[derive(Debug)]
pub(super) struct Dataframe {
    scale: f64,
}

impl Dataframe {
    pub(super) fn new(scale: f64) -> Self {
        Self { scale }
    }

    /// Allocates the columns of a table and their validity bits: two slots per column.
    fn load(&self, script: &mut Script, random: &mut Minstd, rows: u64) -> Vec<usize> {
        let mut slots = Vec::new();
        for _ in 0..random.draw(2, 8) {
            let width = [1, 2, 4, 4, 8, 8, 8, 16][random.draw(0, 7) as usize];
            slots.push(script.allocate(rows * width, "column"));
            slots.push(script.allocate(bitmap(rows), "validity"));
        }
        script.work(rows / 8);
        slots
    }
}

/// Returns the bytes of `rows` bits, in units of 64 bytes.
fn bitmap(rows: u64) -> u64 {
    rows.div_ceil(8).next_multiple_of(64)
}

impl Model for Dataframe {
    fn lanes(&self) -> Vec<LaneId> {
        (1..=4).map(|lane| LaneId { thread: u64::from(lane), stream: lane }).collect()
    }

    fn keep_bytes(&self) -> u64 {
        scaled(1 << 30, self.scale)
    }

    fn script(&mut self, random: &mut Minstd) -> Script {
        let mut script = Script::default();
        let most = scaled(4_000_000, self.scale).max(10_000);
        let rows = draw_size(random, Sizes::LogUniform, 10_000, most);
        let columns = self.load(&mut script, random, rows);

        let mask = script.allocate(rows, "filter mask");
        let scan = script.allocate(rows * 4, "filter scan");
        let total = script.allocate(8, "row count");
        script.work(rows / 4);
        let found = (rows * random.draw(1, 90) / 100).max(1);
        let map = script.allocate(found * 4, "gather map");
        script.free_all([scan, mask]);
        let mut kept = Vec::new();
        for _ in 0..columns.len() / 2 {
            let width = [4, 8][random.draw(0, 1) as usize];
            kept.push(script.allocate(found * width, "filtered column"));
            kept.push(script.allocate(bitmap(found), "validity"));
        }
        script.free(total);
        script.free(map);
        script.free_all(columns);

        let groups = match random.draw(0, 2) {
            0 => {
                let other = (found / random.draw(2, 50)).max(1);
                let build = self.load(&mut script, random, other);
                let table = script.allocate((other * 2).next_power_of_two() * 12, "hash table");
                let pairs = found * random.draw(50, 150) / 100 + 1;
                let left = script.allocate(pairs * 4, "join left map");
                let right = script.allocate(pairs * 4, "join right map");
                script.work(found / 2);
                script.free(table);
                kept.push(script.allocate(pairs * 8, "joined column"));
                script.free_all([left, right]);
                script.free_all(build.into_iter().rev());
                pairs
            }
            1 => {
                let keys = script.allocate(found * 8, "sort keys");
                let order = script.allocate(found * 4, "sort order");
                let scratch = script.allocate(found * 12 + 4096, "sort scratch");
                script.work(found);
                script.free_all([scratch, keys]);
                kept.push(script.allocate(found * 8, "sorted column"));
                script.free(order);
                found
            }
            _ => found,
        };

        let groups = (groups / random.draw(10, 10_000)).max(1);
        let table = script.allocate((groups * 2).next_power_of_two() * 16, "hash table");
        let result: Vec<_> =
            (0..random.draw(1, 4)).map(|_| script.allocate(groups * 8, "aggregate")).collect();
        script.work(found / 4);
        script.free(table);
        script.free_all(kept);
        result.into_iter().for_each(|slot| script.keep(slot));
        script
    }
}
