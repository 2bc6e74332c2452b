//! A pair of bytes and blocks, which are limited together.

/// Bytes and blocks: an amount, or the limit of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct BytesAndBlocks {
    pub(super) bytes: i64,
    pub(super) blocks: i64,
}

impl BytesAndBlocks {
    pub(super) const NONE: Self = Self { bytes: 0, blocks: 0 };
    pub(super) const ALL: Self = Self { bytes: i64::MAX, blocks: i64::MAX };

    #[inline(always)]
    pub(super) fn plus(self, bytes: i64, blocks: i64) -> Self {
        Self { bytes: self.bytes.wrapping_add(bytes), blocks: self.blocks.wrapping_add(blocks) }
    }

    #[inline(always)]
    pub(super) fn and(self, other: Self) -> Self {
        self.plus(other.bytes, other.blocks)
    }

    /// Subtracts `other`.
    #[inline(always)]
    pub(super) fn less(self, other: Self) -> Self {
        self.plus(other.bytes.wrapping_neg(), other.blocks.wrapping_neg())
    }

    /// Returns whether both are at least 0.
    #[inline(always)]
    pub(super) fn is_room(self) -> bool {
        (self.bytes | self.blocks) >= 0
    }

    /// Returns whether `other` exceeds this in neither.
    #[inline(always)]
    pub(super) fn holds(self, other: Self) -> bool {
        self.less(other).is_room()
    }

    pub(super) fn distance(self) -> Self {
        Self { bytes: self.bytes.wrapping_abs(), blocks: self.blocks.wrapping_abs() }
    }

    pub(super) fn min(self, other: Self) -> Self {
        Self { bytes: self.bytes.min(other.bytes), blocks: self.blocks.min(other.blocks) }
    }

    pub(super) fn max(self, other: Self) -> Self {
        Self { bytes: self.bytes.max(other.bytes), blocks: self.blocks.max(other.blocks) }
    }

    /// Both divided by `by`, rounded towards 0.
    pub(super) fn divided_by(self, by: i64) -> Self {
        Self { bytes: self.bytes / by, blocks: self.blocks / by }
    }
}
