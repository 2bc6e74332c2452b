//! The published tags of a process, in the last bytes of its slot. For display only.
//!
//! A checksum over the tags and the slot's start time rejects torn or damaged tags and those of an earlier owner. Names are cut so that two
//! long ones or several short ones fit.

use crate::format::{UNIT, checksum, u32_at, u64_at};
use crate::snapshot::shown;

/// The bytes of the stored tags.
pub(crate) const SIZE: usize = 64;
/// The bytes before the entries: the checksum and the age.
const HEAD: usize = 12;
const AT_AGE: usize = 8;
/// The bytes before each name: its size in units and its length.
const ENTRY: usize = 5;
/// The maximum length of a name, so that two fit.
const LONGEST: usize = (SIZE - HEAD) / 2 - ENTRY;
/// A name that would be cut shorter than this is omitted.
const SHORTEST: usize = 6;
/// The end of a name that was cut.
const CUT: &str = "\u{2026}";
/// Ages are in tenths of a second since the slot's start.
const AGE_NANOS: u64 = 100_000_000;

/// The bytes of one tag, as its process published them.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TagUse {
    /// The tag without characters that could control the terminal; cut if it ends in an ellipsis.
    pub tag: String,
    /// Bytes of its blocks, rounded up to [`UNIT`].
    pub bytes: u64,
}

/// The tags of a slot.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SlotTags {
    /// The publication time in nanoseconds since 1970, to a tenth of a second.
    pub(crate) told: u64,
    /// The tags, the largest first.
    pub tags: Vec<TagUse>,
}

/// Encodes `tags`, largest first, at time `now`, for the owner of a slot that began at `started`.
pub(crate) fn encode<'a>(
    tags: impl IntoIterator<Item = (&'a str, u64)>,
    started: u64,
    now: u64,
) -> [u8; SIZE] {
    let age = now.saturating_sub(started) / AGE_NANOS;
    let mut body = Vec::with_capacity(SIZE);
    body.extend_from_slice(&u32::try_from(age).unwrap_or(u32::MAX).to_le_bytes());
    for (tag, bytes) in tags {
        let room = (SIZE - AT_AGE).saturating_sub(body.len() + ENTRY).min(LONGEST);
        let name = cut(tag, room);
        if bytes == 0 || name.is_empty() {
            continue;
        }
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        body.extend_from_slice(&units.to_le_bytes());
        // At most LONGEST.
        body.push(name.len() as u8);
        body.extend_from_slice(name.as_bytes());
    }
    body.resize(SIZE - AT_AGE, 0);
    let mut record = [0; SIZE];
    for (to, from) in record.iter_mut().zip(sum(&body, started).to_le_bytes().iter().chain(&body)) {
        *to = *from;
    }
    record
}

/// Decodes the tags if they are intact and belong to the slot that began at `started`.
pub(crate) fn decode(record: &[u8], started: u64) -> Option<SlotTags> {
    let body = record.get(AT_AGE..SIZE)?;
    if u64_at(record, 0) != sum(body, started) {
        return None;
    }
    let told = started.saturating_add(u64::from(u32_at(body, 0)) * AGE_NANOS);
    let mut found = SlotTags { told, tags: Vec::new() };
    let mut rest = body.get(HEAD - AT_AGE..)?;
    while let Some(length) = rest.get(ENTRY - 1).copied().filter(|length| *length > 0) {
        let end = ENTRY + usize::from(length);
        let tag = shown(rest.get(ENTRY..end)?);
        found.tags.push(TagUse { tag, bytes: u64::from(u32_at(rest, 0)) * UNIT });
        rest = rest.get(end..)?;
    }
    Some(found)
}

fn sum(body: &[u8], started: u64) -> u64 {
    let bytes: Vec<u8> = body.iter().copied().chain(started.to_le_bytes()).collect();
    checksum(&bytes)
}

/// A name in at most `room` bytes; empty if too little of it would remain.
fn cut(name: &str, room: usize) -> String {
    if name.len() <= room {
        return name.to_owned();
    }
    let Some(room) = room.checked_sub(CUT.len()).filter(|room| *room >= SHORTEST) else {
        return String::new();
    };
    let mut end = room;
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{CUT}", name.get(..end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(tags: &SlotTags) -> Vec<(&str, u64)> {
        tags.tags.iter().map(|one| (one.tag.as_str(), one.bytes)).collect()
    }

    #[test]
    fn what_is_told_is_read_and_what_does_not_fit_is_cut_or_left_out() {
        let second = 1_000_000_000;
        let told = |tags: &[(&str, u64)]| {
            let record = encode(tags.iter().copied(), 7 * second, 9 * second);
            decode(&record, 7 * second).expect("a record")
        };
        let few = told(&[("rows", 512), ("hash table", 1), ("empty", 0), ("x", 256)]);
        assert_eq!(pairs(&few), [("rows", 512), ("hash table", 256), ("x", 256)]);
        assert_eq!(few.told, 9 * second);
        let long =
            told(&[("a name of more than twenty bytes", 1 << 39), ("é".repeat(20).as_str(), 256)]);
        let cut = "é".repeat(9) + "…";
        assert_eq!(pairs(&long), [("a name of more tha…", 1 << 39), (cut.as_str(), 256)]);
        // The published record fits for any number of tags.
        let names: Vec<String> = (0..100).map(|n| format!("tag number {n}")).collect();
        let many: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 256)).collect();
        assert!((2..=5).contains(&told(&many).tags.len()));
        assert_eq!(pairs(&told(&[])), []);
    }

    #[test]
    fn a_torn_damaged_or_foreign_record_is_none() {
        let record = encode([("weights", 4096), ("cache", 256)], 5, 6);
        assert!(decode(&record, 5).is_some());
        assert_eq!(decode(&record, 4), None, "of another owner of the slot");
        for bit in 0..SIZE * 8 {
            let mut flipped = record;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&flipped, 5), None, "bit {bit}");
        }
        for length in 0..SIZE {
            assert_eq!(decode(&record[..length], 5), None, "{length} bytes");
        }
        assert_eq!(decode(&[0; SIZE], 5), None);
    }

    #[test]
    fn a_record_with_a_good_checksum_and_bad_contents_steers_nothing() {
        let mut body = vec![0; SIZE - AT_AGE];
        body[4..].fill(0xff);
        let with_sum = |body: &[u8]| {
            let mut record = sum(body, 5).to_le_bytes().to_vec();
            record.extend_from_slice(body);
            record
        };
        // A length beyond the record.
        assert_eq!(decode(&with_sum(&body), 5), None);
        let record = encode([("\u{1b}[2Jx\n\u{7f}", 256)], 5, 6);
        assert_eq!(pairs(&decode(&record, 5).expect("a record")), [("?[2Jx??", 256)]);
        let mut body = vec![0; SIZE - AT_AGE];
        (body[4], body[8], body[9], body[10]) = (1, 2, 0xff, b'a');
        assert_eq!(pairs(&decode(&with_sum(&body), 5).expect("a record")), [("\u{fffd}a", 256)]);
    }
}
