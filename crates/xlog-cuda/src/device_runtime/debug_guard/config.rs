//! The settings of a guard.

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
    /// About one block in this number as in [`GuardMode::Pages`], independent of the call site; the others are not guarded.
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

/// Where a guard writes its reports, besides its list of reports.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum GuardOutput {
    /// To standard error.
    #[default]
    StandardError,
    /// Appended to this file, which is created if it is missing.
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
    /// Bytes of the canary behind a block, and the minimum of the one before it, which is rounded up to the alignment; 0 for none.
    pub canary_bytes: usize,
    /// Whether blocks are filled when they are handed out and when they are freed.
    pub poison: bool,
    /// The maximum bytes in the quarantine, canaries included.
    pub quarantine_bytes: usize,
    /// The maximum number of blocks in the quarantine; 0 for none.
    pub quarantine_blocks: usize,
    /// Whether reports say where a block was allocated and freed. Walking the stack takes microseconds.
    pub backtraces: bool,
    /// Where a block lies between its guard pages.
    pub placement: PagePlacement,
    /// The maximum physical memory of blocks between guard pages. `None` is 64 MiB if blocks are sampled, otherwise no limit. A
    /// sampled block beyond it is not guarded.
    pub page_bytes: Option<usize>,
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
            placement: PagePlacement::default(),
            page_bytes: None,
            output: GuardOutput::default(),
        }
    }
}

impl GuardConfig {
    /// Sets the mode.
    #[must_use]
    pub fn with_mode(mut self, mode: GuardMode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets whether a free waits for its check.
    #[must_use]
    pub fn with_synchronous(mut self, synchronous: bool) -> Self {
        self.synchronous = synchronous;
        self
    }

    /// Sets the bytes of the canaries.
    #[must_use]
    pub fn with_canary_bytes(mut self, bytes: usize) -> Self {
        self.canary_bytes = bytes;
        self
    }

    /// Sets whether blocks are filled.
    #[must_use]
    pub fn with_poison(mut self, poison: bool) -> Self {
        self.poison = poison;
        self
    }

    /// Sets the limits of the quarantine.
    #[must_use]
    pub fn with_quarantine(mut self, bytes: usize, blocks: usize) -> Self {
        (self.quarantine_bytes, self.quarantine_blocks) = (bytes, blocks);
        self
    }

    /// Sets whether reports have backtraces.
    #[must_use]
    pub fn with_backtraces(mut self, backtraces: bool) -> Self {
        self.backtraces = backtraces;
        self
    }

    /// Sets where a block lies between its guard pages.
    #[must_use]
    pub fn with_placement(mut self, placement: PagePlacement) -> Self {
        self.placement = placement;
        self
    }

    /// Sets the maximum physical memory of blocks between guard pages.
    #[must_use]
    pub fn with_page_bytes(mut self, bytes: usize) -> Self {
        self.page_bytes = Some(bytes);
        self
    }

    /// Sets where reports are written.
    #[must_use]
    pub fn with_output(mut self, output: GuardOutput) -> Self {
        self.output = output;
        self
    }

    /// The maximum physical memory of blocks between guard pages.
    pub(super) fn max_page_bytes(&self) -> usize {
        match (self.page_bytes, self.mode) {
            (Some(bytes), _) => bytes,
            (None, GuardMode::Sampled(_)) => 64 << 20,
            (None, _) => usize::MAX,
        }
    }
}
