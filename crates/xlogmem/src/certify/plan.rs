//! The planted bugs, the stacks, and which pairs must detect the bug.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The planted bug; the variants are in the order of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Bug {
    /// Nothing: every finding is a false alarm
    None,
    /// A kernel writes the byte behind the requested ones
    Overflow,
    /// A kernel writes the byte before a block
    Underflow,
    /// A kernel writes into a block that was freed, and whose work had completed
    WriteAfterFree,
    /// Another stream writes a block that its own stream has not allocated yet
    UseBeforeAllocation,
    /// Another stream reads what the own stream writes, with nothing between them
    MissingWait,
    /// A block is freed twice
    DoubleFree,
    /// A block is never freed
    Leak,
}

impl Bug {
    /// Returns its name in the table.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::None => "no bug",
            Self::Overflow => "overflow by 1 byte",
            Self::Underflow => "underflow by 1 byte",
            Self::WriteAfterFree => "write after free",
            Self::UseBeforeAllocation => "use before allocation",
            Self::MissingWait => "missing wait",
            Self::DoubleFree => "double free",
            Self::Leak => "leak",
        }
    }

    /// Returns whether a kernel accesses bytes outside of its block.
    fn is_stray(self) -> bool {
        matches!(self, Self::Overflow | Self::Underflow | Self::WriteAfterFree)
    }

    /// Returns whether two streams are unordered.
    fn is_race(self) -> bool {
        matches!(self, Self::UseBeforeAllocation | Self::MissingWait)
    }
}

/// The allocator under test; the variants are in the order of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Stack {
    /// One driver allocation per block
    Direct,
    /// Stream-ordered allocation by the driver
    Async,
    /// The pool
    Pool,
    /// The pool under the debug guard, with canaries, poison and quarantine
    Guard,
    /// The pool as it works for a memory checker
    Nvtx,
    /// The debug guard with guard pages
    Pages,
}

impl Stack {
    /// Returns its name in the table.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Async => "async",
            Self::Pool => "pool",
            Self::Guard => "+guard",
            Self::Nvtx => "+NVTX",
            Self::Pages => "pages",
        }
    }
}

/// The conditions of one cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Circumstance {
    pub(crate) bug: Bug,
    pub(crate) stack: Stack,
    pub(crate) simulated: bool,
    /// Whether it runs under compute-sanitizer.
    pub(crate) checker: bool,
}

impl Circumstance {
    /// Returns false if the bug cannot exist: the driver's plain memory belongs to no stream.
    pub(crate) fn is_possible(self) -> bool {
        !(self.bug == Bug::UseBeforeAllocation && self.stack == Stack::Direct)
    }

    /// Returns whether detection needs an absent checker: the stack alone is not meant to detect the bug.
    pub(crate) fn needs_checker(self) -> bool {
        !self.checker && self.stack == Stack::Nvtx && self.bug.is_stray()
    }

    /// Returns whether the certificate requires the expected result of this cell.
    pub(crate) fn is_promised(self) -> bool {
        let Self { bug, stack, simulated, checker } = self;
        if !self.is_possible() {
            return false;
        }
        match bug {
            Bug::None => true,
            _ if checker => bug.is_stray() && matches!(stack, Stack::Direct | Stack::Nvtx),
            Bug::DoubleFree | Bug::Leak => true,
            _ if bug.is_stray() && matches!(stack, Stack::Guard | Stack::Pages) => true,
            // The simulated device checks the order of accesses under every allocator.
            _ => bug.is_race() && simulated,
        }
    }
}
