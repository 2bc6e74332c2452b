//! The layout of a ledger file: offsets, the bytes of a new file, and the validation of an existing one.
//!
//! The first 128 bytes never change after creation and have a checksum. The words that change at run time are separate. Of these only the
//! limit is validated, by its stored complement. This file performs no input or output. `docs/ledger-format.md` specifies the format for
//! other languages.

use std::path::Path;

use crate::error::{LedgerError, LedgerResult};
use crate::key::DeviceKey;

/// The unit of the ledger in bytes. Requests are rounded up to it.
pub const UNIT: u64 = 256;
/// The largest limit in bytes that one word can hold.
pub const MAX_LIMIT: u64 = u32::MAX as u64 * UNIT;
/// The maximum number of slots of a file.
pub const MAX_SLOTS: u32 = 4096;

pub(crate) const MAGIC: [u8; 8] = *b"XLOGLDGR";
/// The newest version. Version 1 has no quotas.
pub(crate) const VERSION: u32 = 2;
/// The version without quotas. A file of it is joined unchanged while processes use it.
pub(crate) const VERSION_1: u32 = 1;
/// Size of the header, and offset of the first slot.
pub(crate) const HEADER_SIZE: usize = 4096;
pub(crate) const SLOT_SIZE: usize = 128;

pub(crate) const AT_VERSION: usize = 8;
const AT_HEADER_SIZE: usize = 12;
const AT_FILE_SIZE: usize = 16;
const AT_SLOTS: usize = 24;
const AT_SLOT_SIZE: usize = 28;
const AT_UNIT: usize = 32;
const AT_KEY_LENGTH: usize = 36;
const AT_KEY: usize = 40;
const AT_CHECKSUM: usize = 120;
/// The end of the immutable part.
pub(crate) const FIXED_SIZE: usize = 128;

pub(crate) const AT_LIMIT: usize = 128;
/// The holder of the file lock, for display. Its first byte is also the byte that is locked.
pub(crate) const AT_HOLDER: usize = 192;
pub(crate) const AT_PRESSURE: usize = 256;
/// The byte that viewers lock in shared mode. Its value has no meaning.
pub(crate) const AT_WATCH: usize = 320;
/// A futex word on which listeners wait; it changes with every request to them.
pub(crate) const AT_BELL: usize = 384;
/// The number of asks.
pub(crate) const AT_ASKS: usize = 388;
/// A futex word on which asking processes wait; it changes when memory is returned under pressure and when an ask is answered.
pub(crate) const AT_RETURNS: usize = 448;
/// The answers of listeners, eight bytes for each of the first slots.
pub(crate) const AT_ANSWERS: usize = 512;
/// The number of slots that have an answer.
pub(crate) const ANSWERS: usize = (HEADER_SIZE - AT_ANSWERS) / ANSWER_SIZE;
pub(crate) const ANSWER_SIZE: usize = 8;
pub(crate) const ANSWER_PENDING: usize = 0;
pub(crate) const ANSWER_NUMBER: usize = 4;

pub(crate) const SLOT_WORD: usize = 0;
pub(crate) const SLOT_PEAK: usize = 8;
pub(crate) const SLOT_PID: usize = 16;
pub(crate) const SLOT_STARTED: usize = 24;
pub(crate) const SLOT_NAME: usize = 32;
pub(crate) const SLOT_NAME_SIZE: usize = 32;
pub(crate) const SLOT_TAGS: usize = 64;
/// The high half of the process id's word: cached units plus one, 0 if the owner does not publish them.
pub(crate) const SLOT_CACHED: usize = 20;

/// The quotas of the slots follow the slots.
pub(crate) const QUOTA_SIZE: usize = 64;
/// The limit of the slot's owner, stored like the device's limit; 0 if there is none.
pub(crate) const QUOTA_LIMIT: usize = 0;
/// Units guaranteed to the slot's owner, stored like the limit.
pub(crate) const QUOTA_GUARANTEED: usize = 8;
pub(crate) const QUOTA_NAME: usize = 32;
pub(crate) const QUOTA_NAME_SIZE: usize = 32;

/// The immutable part of a validated header.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) key: DeviceKey,
    pub(crate) slots: u32,
    pub(crate) file_size: u64,
}

/// The size of a file of `version` with this number of slots.
pub(crate) fn file_size(version: u32, slots: u32) -> u64 {
    let each = if version == VERSION_1 { SLOT_SIZE } else { SLOT_SIZE + QUOTA_SIZE };
    HEADER_SIZE as u64 + u64::from(slots) * each as u64
}

/// The offset of a slot's quota in a file with this number of slots.
pub(crate) fn quota_offset(slots: u32, index: usize) -> usize {
    slot_offset(slots as usize) + index * QUOTA_SIZE
}

/// The offset of a slot, and of the byte that its living owner locks.
pub(crate) fn slot_offset(index: usize) -> usize {
    HEADER_SIZE + index * SLOT_SIZE
}

/// The units of a request, rounded up; `None` if no word can hold them.
pub(crate) fn units_of(bytes: u64) -> Option<u32> {
    u32::try_from(bytes.div_ceil(UNIT)).ok()
}

/// The stored form of a limit: the units in the low half and their complement in the high half.
pub(crate) fn pack_limit(units: u32) -> u64 {
    u64::from(!units) << 32 | u64::from(units)
}

/// The units of a stored limit; `None` if it is invalid.
pub(crate) fn unpack_limit(raw: u64) -> Option<u32> {
    let units = (raw & u64::from(u32::MAX)) as u32;
    (pack_limit(units) == raw && units > 0).then_some(units)
}

/// The units of a stored quota: `Some(None)` if there is none, `None` if it is damaged.
pub(crate) fn unpack_quota(raw: u64) -> Option<Option<u32>> {
    let units = (raw & u64::from(u32::MAX)) as u32;
    match raw {
        0 => Some(None),
        _ => (pack_limit(units) == raw).then_some(Some(units)),
    }
}

/// FNV-1a, 64 bits: short enough to be written again in any language.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The fixed part of the header of a file.
pub(crate) fn fixed_part(version: u32, key: &DeviceKey, slots: u32) -> Vec<u8> {
    let key = key.as_str().as_bytes();
    let mut fixed = Vec::with_capacity(FIXED_SIZE);
    fixed.extend_from_slice(&MAGIC);
    fixed.extend_from_slice(&version.to_le_bytes());
    fixed.extend_from_slice(&(HEADER_SIZE as u32).to_le_bytes());
    fixed.extend_from_slice(&file_size(version, slots).to_le_bytes());
    fixed.extend_from_slice(&slots.to_le_bytes());
    fixed.extend_from_slice(&(SLOT_SIZE as u32).to_le_bytes());
    fixed.extend_from_slice(&(UNIT as u32).to_le_bytes());
    fixed.extend_from_slice(&(key.len() as u32).to_le_bytes());
    fixed.extend_from_slice(key);
    fixed.resize(AT_CHECKSUM, 0);
    let sum = checksum(&fixed);
    fixed.extend_from_slice(&sum.to_le_bytes());
    fixed
}

/// The bytes of a new file: no process, nothing used.
pub(crate) fn new_file(key: &DeviceKey, slots: u32, limit_units: u32) -> Vec<u8> {
    let mut file = fixed_part(VERSION, key, slots);
    file.extend_from_slice(&pack_limit(limit_units).to_le_bytes());
    file.resize(file_size(VERSION, slots) as usize, 0);
    file
}

/// Checks the first bytes of a file of `size` bytes. What passes is a header that this version or an older one wrote.
///
/// A file of version 1 may have the size of version 2: its upgrade was interrupted.
pub(crate) fn check_header(path: &Path, bytes: &[u8], size: u64) -> LedgerResult<Header> {
    let damaged = |what: String| LedgerError::Damaged { path: path.to_owned(), what };
    if size < HEADER_SIZE as u64 || bytes.len() < AT_LIMIT + 8 {
        let expected = file_size(VERSION, 1);
        return Err(LedgerError::Truncated { path: path.to_owned(), size, expected });
    }
    let fixed = bytes.get(..FIXED_SIZE).unwrap_or_default();
    if fixed.iter().all(|byte| *byte == 0) {
        return Err(damaged("its header is all zero".into()));
    }
    if fixed.get(..MAGIC.len()) != Some(MAGIC.as_slice()) {
        return Err(damaged("it does not begin with XLOGLDGR".into()));
    }
    // Read before the checksum: a newer version may keep that elsewhere.
    let version = u32_at(fixed, AT_VERSION);
    if version > VERSION {
        let path = path.to_owned();
        return Err(LedgerError::NewerVersion { path, version, supported: VERSION });
    }
    if version == 0 {
        return Err(damaged(format!("there is no format version {version}")));
    }
    let (stored, computed) =
        (u64_at(fixed, AT_CHECKSUM), checksum(fixed.get(..AT_CHECKSUM).unwrap_or_default()));
    if stored != computed {
        return Err(damaged(format!("header checksum {stored:016x}, computed {computed:016x}")));
    }
    let slots = u32_at(fixed, AT_SLOTS);
    let sizes_match = u32_at(fixed, AT_HEADER_SIZE) == HEADER_SIZE as u32
        && u32_at(fixed, AT_SLOT_SIZE) == SLOT_SIZE as u32
        && u64::from(u32_at(fixed, AT_UNIT)) == UNIT
        && (1..=MAX_SLOTS).contains(&slots)
        && u64_at(fixed, AT_FILE_SIZE) == file_size(version, slots);
    if !sizes_match {
        return Err(damaged("its header gives sizes that no ledger has".into()));
    }
    let expected = file_size(version, slots);
    if size < expected {
        return Err(LedgerError::Truncated { path: path.to_owned(), size, expected });
    }
    if size > expected && size != file_size(VERSION, slots) {
        return Err(damaged(format!("{size} bytes long, expected {expected}")));
    }
    let length = u32_at(fixed, AT_KEY_LENGTH) as usize;
    let key = fixed
        .get(AT_KEY..AT_KEY.saturating_add(length))
        .filter(|_| length <= DeviceKey::MAX_LENGTH)
        .and_then(|key| std::str::from_utf8(key).ok())
        .and_then(|key| DeviceKey::new(key).ok())
        .ok_or_else(|| damaged("its header holds no device key".into()))?;
    check_limit_word(path, u64_at(bytes, AT_LIMIT))?;
    Ok(Header { version, key, slots, file_size: expected })
}

/// The units of the limit word, or what is wrong with it.
pub(crate) fn check_limit_word(path: &Path, raw: u64) -> LedgerResult<u32> {
    unpack_limit(raw).ok_or_else(|| LedgerError::Damaged {
        path: path.to_owned(),
        what: format!("limit word {raw:016x} is no limit"),
    })
}

/// The number at an offset; 0 outside, which no check above accepts.
pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let field = bytes.get(offset..offset.saturating_add(4)).and_then(|field| field.try_into().ok());
    field.map_or(0, u32::from_le_bytes)
}

/// The number at an offset; 0 outside.
pub(crate) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let field = bytes.get(offset..offset.saturating_add(8)).and_then(|field| field.try_into().ok());
    field.map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bytes: &[u8]) -> LedgerResult<Header> {
        check_header(Path::new("/x/k.ledger"), bytes, bytes.len() as u64)
    }

    #[test]
    fn a_new_file_passes_its_own_check() {
        let key = DeviceKey::new("GPU-1").expect("a key");
        let file = new_file(&key, 3, 77);
        let header = check(&file).expect("a valid header");
        assert_eq!(header, Header { version: 2, key, slots: 3, file_size: 4096 + 3 * (128 + 64) });
        assert_eq!(unpack_limit(u64_at(&file, AT_LIMIT)), Some(77));
    }

    #[test]
    fn every_single_bit_flip_in_what_is_believed_is_found() {
        let file = new_file(&DeviceKey::new("GPU-1").expect("a key"), 2, 77);
        for bit in 0..(AT_LIMIT + 8) * 8 {
            let mut flipped = file.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(check(&flipped).is_err(), "bit {bit} flipped and believed");
        }
    }

    #[test]
    fn every_truncation_is_found() {
        let file = new_file(&DeviceKey::new("GPU-1").expect("a key"), 1, 77);
        for length in 0..file.len() {
            let error = check(&file[..length]).expect_err("cut");
            assert!(matches!(error, LedgerError::Truncated { .. }), "{length}: {error}");
        }
    }

    #[test]
    fn a_file_of_version_1_passes_also_in_the_middle_of_its_upgrade() {
        let key = DeviceKey::new("GPU-1").expect("a key");
        let mut file = fixed_part(VERSION_1, &key, 2);
        file.extend_from_slice(&pack_limit(77).to_le_bytes());
        for size in [4096 + 2 * 128, 4096 + 2 * (128 + 64)] {
            file.resize(size, 0);
            assert_eq!(check(&file).expect("a valid header").version, 1);
        }
        file.push(0);
        assert!(matches!(check(&file), Err(LedgerError::Damaged { .. })));
    }

    #[test]
    fn a_quota_of_nothing_is_not_the_lack_of_a_quota() {
        assert_eq!(unpack_quota(0), Some(None));
        assert_eq!(unpack_quota(pack_limit(0)), Some(Some(0)));
        assert_eq!(unpack_quota(pack_limit(7)), Some(Some(7)));
        assert_eq!(unpack_quota(pack_limit(7) ^ 1), None);
    }

    #[test]
    fn a_limit_word_of_zeroes_ones_or_noise_is_no_limit() {
        for raw in [0, u64::MAX, 1, pack_limit(5) ^ (1 << 40), pack_limit(0)] {
            assert_eq!(unpack_limit(raw), None, "{raw:x}");
        }
        assert_eq!(unpack_limit(pack_limit(u32::MAX)), Some(u32::MAX));
    }

    #[test]
    fn a_request_is_rounded_up() {
        assert_eq!(units_of(0), Some(0));
        assert_eq!(units_of(1), Some(1));
        assert_eq!(units_of(256), Some(1));
        assert_eq!(units_of(257), Some(2));
        assert_eq!(units_of(MAX_LIMIT), Some(u32::MAX));
        assert_eq!(units_of(MAX_LIMIT + 1), None);
        assert_eq!(units_of(u64::MAX), None);
    }
}
