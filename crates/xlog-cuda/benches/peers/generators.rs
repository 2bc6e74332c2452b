//! The random numbers of the workloads, bit for bit the same for every peer, and the hash that proves it.

pub use xlog_base::Minstd;

/// Marsaglia's xorshift with 64 bits, reduced by the remainder.
#[derive(Debug)]
pub struct Xorshift(pub u64);

impl Xorshift {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// A size from `low` to `high`, every power of two as likely as another.
pub fn log_uniform(random: &mut Minstd, low: u64, high: u64) -> u64 {
    let part = random.draw(0, 1 << 30) as f64 / (1_u64 << 30) as f64;
    let from = (low as f64).ln();
    let size = (from + part * ((high as f64).ln() - from)).exp() as u64;
    size.clamp(low, high)
}

/// FNV-1a with 64 bits over little-endian words.
#[derive(Debug)]
pub struct Fnv(pub u64);

impl Fnv {
    pub fn new() -> Self {
        Self(14_695_981_039_346_656_037)
    }

    pub fn add(&mut self, word: u64) {
        for byte in word.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(1_099_511_628_211);
        }
    }
}

/// What a random run must come to when no allocation fails: allocations, largest in MiB, peak live, peak bytes, hash.
pub const CHECKS: [(usize, usize, usize, u64, u64); 8] = [
    (1_000, 1, 638, 323_760_572, 0x0a01_169c_41d5_b10b),
    (1_000, 64, 528, 16_777_102_043, 0x42dd_1852_40e2_338e),
    (1_000, 4096, 15, 16_775_344_215, 0xf33f_6e23_9df3_e016),
    (10_000, 1, 6_204, 3_254_545_443, 0xb481_79f7_7193_0716),
    (10_000, 256, 167, 16_777_171_549, 0xa0e1_5ceb_7379_d680),
    (100_000, 1, 36_071, 16_777_215_997, 0xe20b_4cec_1688_e184),
    (100_000, 4, 9_714, 16_777_215_986, 0x1c19_b69f_5585_7e88),
    (100_000, 4096, 19, 16_777_201_659, 0x0114_dd31_6b70_ed04),
];
