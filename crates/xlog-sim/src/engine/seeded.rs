//! The deterministic engine: the seed decides which streams progress, and how far.

use super::{Guard, SharedMachine, perform};

impl SharedMachine {
    /// Runs operations during a host call, as many as the seed decides.
    ///
    /// Each seed has one of four probabilities to continue, from 1/16 (nearly nothing runs before it must) to 7/8 (nearly everything runs
    /// at once).
    pub(crate) fn advance<'a>(&'a self, mut state: Guard<'a>) -> Guard<'a> {
        let temper = self.config.seed.unwrap_or(0) % 4;
        loop {
            let go_on = match temper {
                0 => state.rng.below(16) == 0,
                1 => state.rng.below(3) == 0,
                2 => state.rng.below(2) == 0,
                _ => state.rng.below(8) != 0,
            };
            if !go_on {
                return state;
            }
            let (guard, stepped) = self.step(state);
            state = guard;
            if !stepped {
                return state;
            }
        }
    }

    /// Executes one operation of a stream that the seed chooses. Returns false if none can run.
    pub(crate) fn step<'a>(&'a self, mut state: Guard<'a>) -> (Guard<'a>, bool) {
        let ready: Vec<u64> =
            state.streams.keys().copied().filter(|&stream| state.is_ready(stream)).collect();
        if ready.is_empty() {
            return (state, false);
        }
        let stream = ready[state.rng.below(ready.len())];
        let ordinal = state.streams.get(&stream).map_or(0, |stream| stream.ordinal);
        if let Some(op) = state.start(stream) {
            let sequence = op.meta.sequence;
            drop(state);
            let outcome = perform(self.machine, op);
            state = self.lock();
            state.finish(stream, sequence);
            if let Err(reason) = outcome {
                drop(state);
                self.lose(ordinal, 700, reason);
                state = self.lock();
            }
        }
        if state.waiters > 0 {
            self.changed.notify_all();
        }
        (state, true)
    }
}
