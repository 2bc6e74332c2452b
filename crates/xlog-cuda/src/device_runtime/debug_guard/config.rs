//! What a guard does, and how much it may hold.

use std::num::NonZeroU64;
use std::path::PathBuf;

/// Which blocks are guarded, and how.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum GuardMode {
    /// Every block: known bytes around it and in it, checked when it is freed and when it leaves the quarantine.
    #[default]
    Canaries,
    /// Every block: between addresses where nothing is mapped, so that a stray access faults.
    Pages,
    /// About one block in so many as in [`GuardMode::Pages`], whichever calls they come from; the others not at all.
    Sampled(NonZeroU64),
}

/// Where a block lies between its guard pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum PagePlacement {
    /// At the end, so that an access behind it faults.
    #[default]
    End,
    /// At the start, so that an access before it faults.
    Start,
}

/// Where a guard writes what it found, besides its list of reports.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum GuardOutput {
    /// To standard error.
    #[default]
    StandardError,
    /// To the end of this file, which is made if it is not there.
    File(PathBuf),
    /// Nowhere.
    Silent,
}

/// Settings of a [`DebugGuardResource`](super::DebugGuardResource). Every value is accepted.
///
/// ```
/// use xlog_cuda::device_runtime::GuardConfig;
///
/// let config = GuardConfig::default().with_canary_bytes(64).with_quarantine(1 << 20, 100);
/// assert_eq!((config.canary_bytes, config.quarantine_blocks), (64, 100));
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct GuardConfig {
    /// Which blocks are guarded, and how.
    pub mode: GuardMode,
    /// Whether a free waits for its own check, and returns the damage.
    pub synchronous: bool,
    /// Guarded bytes behind a block, and before it at least; 0 for none. Before it they are rounded up to its alignment.
    pub canary_bytes: usize,
    /// Whether blocks are filled when they are handed out and when they are freed.
    pub poison: bool,
    /// The most bytes the quarantine holds, canaries included.
    pub quarantine_bytes: usize,
    /// The most blocks the quarantine holds; 0 for none.
    pub quarantine_blocks: usize,
    /// Whether reports say where a block was allocated and freed. Walking the stack takes microseconds.
    pub backtraces: bool,
    /// Freed blocks that a post-mortem remembers.
    pub history_blocks: usize,
    /// Where a block lies between its guard pages.
    pub placement: PagePlacement,
    /// The most physical memory that blocks between guard pages take; `None`: 64 MiB where blocks are sampled, else no limit.
    /// What is sampled beyond that is not guarded.
    pub page_bytes: Option<usize>,
    /// Address ranges of freed blocks that stay unmapped before one is used again.
    pub resting_ranges: usize,
    /// Where reports are written.
    pub output: GuardOutput,
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self {
            mode: GuardMode::default(),
            synchronous: false,
            canary_bytes: 256,
            poison: true,
            quarantine_bytes: 64 << 20,
            quarantine_blocks: 1024,
            backtraces: false,
            history_blocks: 1024,
            placement: PagePlacement::default(),
            page_bytes: None,
            resting_ranges: 1024,
            output: GuardOutput::default(),
        }
    }
}

impl GuardConfig {
    /// The same in another mode.
    #[must_use]
    pub fn with_mode(mut self, mode: GuardMode) -> Self {
        self.mode = mode;
        self
    }

    /// The same, with frees that wait for their check, or not.
    #[must_use]
    pub fn with_synchronous(mut self, synchronous: bool) -> Self {
        self.synchronous = synchronous;
        self
    }

    /// The same with so many guarded bytes at each end of a block.
    #[must_use]
    pub fn with_canary_bytes(mut self, bytes: usize) -> Self {
        self.canary_bytes = bytes;
        self
    }

    /// The same with blocks filled, or not.
    #[must_use]
    pub fn with_poison(mut self, poison: bool) -> Self {
        self.poison = poison;
        self
    }

    /// The same with a quarantine of at most so many bytes and blocks.
    #[must_use]
    pub fn with_quarantine(mut self, bytes: usize, blocks: usize) -> Self {
        (self.quarantine_bytes, self.quarantine_blocks) = (bytes, blocks);
        self
    }

    /// The same with backtraces, or without.
    #[must_use]
    pub fn with_backtraces(mut self, backtraces: bool) -> Self {
        self.backtraces = backtraces;
        self
    }

    /// The same with so many freed blocks remembered.
    #[must_use]
    pub fn with_history(mut self, blocks: usize) -> Self {
        self.history_blocks = blocks;
        self
    }

    /// The same with blocks at this end of their pages.
    #[must_use]
    pub fn with_placement(mut self, placement: PagePlacement) -> Self {
        self.placement = placement;
        self
    }

    /// The same with at most so much physical memory for blocks between guard pages.
    #[must_use]
    pub fn with_page_bytes(mut self, bytes: usize) -> Self {
        self.page_bytes = Some(bytes);
        self
    }

    /// The same with so many ranges that stay unmapped.
    #[must_use]
    pub fn with_resting_ranges(mut self, ranges: usize) -> Self {
        self.resting_ranges = ranges;
        self
    }

    /// The same with reports written there.
    #[must_use]
    pub fn with_output(mut self, output: GuardOutput) -> Self {
        self.output = output;
        self
    }

    /// The most physical memory that blocks between guard pages take.
    pub(super) fn max_page_bytes(&self) -> usize {
        match (self.page_bytes, self.mode) {
            (Some(bytes), _) => bytes,
            (None, GuardMode::Sampled(_)) => 64 << 20,
            (None, _) => usize::MAX,
        }
    }
}
