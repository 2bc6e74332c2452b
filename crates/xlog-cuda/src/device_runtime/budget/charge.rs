//! The charge of one block, as the table of charges has it.

use super::tag_counts::TagIndex;
use super::tree::ScopeIndex;

/// The charge of a block: its bytes, its tag and its scope.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Charge {
    pub(crate) bytes: usize,
    pub(crate) tag: TagIndex,
    pub(crate) scope: ScopeIndex,
}

impl Charge {
    /// The words of a table. The tag is in the low half of the second, the scope in the high one.
    #[inline(always)]
    pub(crate) fn to_words(self) -> [u64; 2] {
        [self.bytes as u64, u64::from(self.tag) | u64::from(self.scope) << 32]
    }

    /// The charge in the words of a table.
    #[inline(always)]
    pub(crate) fn from_words([bytes, tag_and_scope]: [u64; 2]) -> Self {
        let (tag, scope) = (tag_and_scope as u32, (tag_and_scope >> 32) as u32);
        Self { bytes: bytes as usize, tag, scope }
    }
}
