//! A language model that serves requests.
//!
//! One thread, one stream for the work and one for the cache. Weights are allocated first. A request takes activations by
//! the length of its prompt, then a page of the key-value cache for every 16 tokens, and a few small buffers per token. Its
//! pages are freed when it ends. Up to 24 requests run at a time.

use super::{LaneId, Minstd, Model, Script, scaled};
use crate::{Sizes, draw_size};

const LAYERS: u64 = 16;
const VOCABULARY: u64 = 32_000;
/// Bytes of a half-precision value.
const HALF: u64 = 2;
const PAGE_TOKENS: u64 = 16;

#[derive(Debug)]
pub(super) struct Llm {
    width: u64,
}

impl Llm {
    pub(super) fn new(scale: f64) -> Self {
        Self { width: scaled(2_048, scale.sqrt()).next_multiple_of(64) }
    }

    /// Returns the bytes of keys and values of [`PAGE_TOKENS`] tokens in all layers; four queries share a head.
    fn page(&self) -> u64 {
        2 * LAYERS * PAGE_TOKENS * self.width / 4 * HALF
    }
}

impl Model for Llm {
    fn prologue(&self) -> Vec<(u64, &'static str)> {
        let square = self.width * self.width * HALF;
        let mut weights = vec![(VOCABULARY * self.width * HALF, "weights embedding")];
        for _ in 0..LAYERS {
            weights.push((square * 3 / 2, "weights attention"));
            weights.push((square, "weights output"));
            weights.push((square * 8, "weights mlp"));
            weights.push((self.width * HALF * 2, "weights norm"));
        }
        weights
    }

    fn lanes(&self) -> Vec<LaneId> {
        (0..24).map(|lane| LaneId { thread: 1, stream: if lane < 20 { 1 } else { 2 } }).collect()
    }

    fn script(&mut self, random: &mut Minstd) -> Script {
        let mut script = Script::default();
        let prompt = draw_size(random, Sizes::LogUniform, 16, 4_096);
        let answer = draw_size(random, Sizes::LogUniform, 8, 1_024);
        let mut pages: Vec<usize> = (0..prompt.div_ceil(PAGE_TOKENS))
            .map(|_| script.allocate(self.page(), "kv page"))
            .collect();

        let hidden = script.allocate(prompt * self.width * HALF, "activation");
        for _ in 0..LAYERS {
            let heads = script.allocate(prompt * self.width * HALF * 3 / 2, "attention");
            let scratch = script.allocate(prompt * 64 * 4, "attention scratch");
            script.work(prompt * 400);
            script.free(scratch);
            let inner = script.allocate(prompt * self.width * HALF * 4, "mlp");
            script.free(heads);
            script.work(prompt * 600);
            script.free(inner);
        }
        let logits = script.allocate(VOCABULARY * 4, "logits");
        script.free(hidden);
        script.free(logits);

        for token in prompt..prompt + answer {
            if token.is_multiple_of(PAGE_TOKENS) {
                pages.push(script.allocate(self.page(), "kv page"));
            }
            let step = script.allocate(self.width * HALF * 6, "decode activation");
            let logits = script.allocate(VOCABULARY * 4, "logits");
            let sample = script.allocate(8, "sample");
            script.work(20_000);
            script.free_all([step, logits, sample]);
        }
        script.free_all(pages);
        script
    }
}
