//! The layout of a guarded block: the user's bytes and the redzones around them.

use crate::device_runtime::resource::MIN_ALIGN;

/// The byte of the redzones.
pub(super) const CANARY: u8 = 0xc7;
/// The byte that fills a new block.
pub(super) const FRESH: u8 = 0xa9;
/// The byte that fills a freed block.
pub(super) const FREED: u8 = 0xd6;

/// The bytes of one block, in the order of their addresses: front, user, back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Redzones {
    /// The address of the front canary.
    pub(super) base: u64,
    /// The bytes of the front canary.
    pub(super) front: usize,
    /// The user's bytes.
    pub(super) bytes: usize,
    /// The bytes of the back canary.
    pub(super) back: usize,
}

impl Redzones {
    /// The address of the user's bytes.
    pub(super) fn user(&self) -> u64 {
        self.base + self.front as u64
    }

    pub(super) fn back_at(&self) -> u64 {
        self.user() + self.bytes as u64
    }

    /// Converts an offset from the base to one from the user's first byte.
    pub(super) fn offset_of(&self, from_base: u64) -> i64 {
        from_base as i64 - self.front as i64
    }

    /// Bytes from an offset to the end of its part: front, user or back.
    pub(super) fn left_of_part(&self, from_base: u64) -> usize {
        let (at, user_end) = (from_base as usize, self.front + self.bytes);
        let end = match at {
            _ if at < self.front => self.front,
            _ if at < user_end => user_end,
            _ => user_end + self.back,
        };
        end.saturating_sub(at)
    }

    /// The number of bytes that a check reads.
    pub(super) fn checked_bytes(&self, inside: bool) -> usize {
        self.front + self.back + if inside { self.bytes } else { 0 }
    }
}

/// Returns the bytes before a block, and the total size of the block below; `None` on overflow.
pub(super) fn layout(bytes: usize, align: usize, canary: usize) -> Option<(usize, usize)> {
    let front = canary.checked_next_multiple_of(align.max(MIN_ALIGN))?;
    let total = front.checked_add(bytes)?.checked_add(canary)?;
    Some((front, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_takes_its_canaries_to_the_byte() {
        assert_eq!(layout(1000, 256, 256), Some((256, 1512)));
        assert_eq!(layout(1000, 1, 100), Some((256, 1356)));
        assert_eq!(layout(1000, 4096, 100), Some((4096, 5196)));
        assert_eq!(layout(1000, 256, 0), Some((0, 1000)));
        assert_eq!(layout(usize::MAX - 100, 256, 64), None);
        assert_eq!(layout(1, 256, usize::MAX), None);
    }
}
