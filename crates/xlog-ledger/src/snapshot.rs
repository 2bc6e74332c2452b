//! Snapshots of a ledger: the slots of all processes. For display and reports; no decision depends on them.
//!
//! The words are read one after another while their owners continue, so sums are approximate. Each process wrote its own name and id;
//! characters that could control the terminal or reorder text are replaced.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use xlog_base::escape::is_unsafe;

use crate::format::{
    ANSWER_NUMBER, ANSWER_PENDING, ANSWER_SIZE, ANSWERS, AT_ANSWERS, AT_ASKS, AT_LIMIT,
    AT_PRESSURE, Header, QUOTA_GUARANTEED, QUOTA_LIMIT, QUOTA_NAME, QUOTA_NAME_SIZE, SLOT_CACHED,
    SLOT_NAME, SLOT_NAME_SIZE, SLOT_PEAK, SLOT_PID, SLOT_STARTED, SLOT_TAGS, SLOT_WORD, UNIT,
    VERSION_1, quota_offset, slot_offset, u32_at, u64_at, unpack_limit, unpack_quota,
};
use crate::key::DeviceKey;
use crate::quota::Quota;
use crate::tags::{self, SlotTags};
use crate::word::Word;

/// A ledger found in a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LedgerFile {
    /// The file.
    pub path: PathBuf,
    /// The device, from the file's name.
    pub key: DeviceKey,
}

/// The result of a reclaim of dead slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Reclaimed {
    /// The number of slots of dead owners.
    pub slots: u32,
    /// The bytes that these slots held, used or granted.
    pub bytes: u64,
}

/// The state of one slot, in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SlotSnapshot {
    /// The number of the slot.
    pub index: u32,
    /// The process id in its owner's namespace.
    pub pid: u32,
    /// The time at which the owner opened the ledger.
    pub started: SystemTime,
    /// The owner's name, by default its command.
    pub name: String,
    /// True if the owner lives. The next request that needs a dead owner's bytes reclaims them.
    pub alive: bool,
    /// Bytes in use.
    pub used: u64,
    /// Bytes granted and not in use.
    pub granted: u64,
    /// The peak of used bytes.
    pub peak: u64,
    /// The owner's last published part of the bytes in use, if any.
    pub memory: Option<SlotMemory>,
    /// The owner's last published tags, if any.
    pub tags: Option<SlotTags>,
    /// The owner's quota; empty if it has none.
    pub quota: Quota,
}

/// The published part of a slot's used bytes that live blocks do not hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SlotMemory {
    /// Bytes that the owner has cached, outside of blocks.
    pub cached: u64,
    /// Bytes of freed blocks with pending work on streams.
    pub pending: u64,
    /// True if the owner has answered the last request for cached memory. A stopped process has not.
    pub has_answered: bool,
}

/// The state of a whole ledger, in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// The file.
    pub path: PathBuf,
    /// The device.
    pub key: DeviceKey,
    /// The version of the file. Version 1 has no quotas.
    pub version: u32,
    /// The limit.
    pub limit: u64,
    /// The limit minus what all slots use or are granted.
    pub free: u64,
    /// True while processes return their grants: a request needed them, and living processes hold more than seven eighths of the limit.
    pub pressure: bool,
    /// The number of slots in the file.
    pub capacity: u32,
    /// The slots with an owner, or with a dead owner's bytes.
    pub slots: Vec<SlotSnapshot>,
}

impl Snapshot {
    /// Reads the content of a file with a checked header. `alive` is called for the slots in use.
    pub(crate) fn of_bytes(
        path: PathBuf,
        header: Header,
        bytes: &[u8],
        mut alive: impl FnMut(u32) -> bool,
    ) -> Self {
        let Header { version, key, slots: capacity, .. } = header;
        let (mut held, mut held_alive) = (0u64, 0u64);
        let mut slots = Vec::new();
        for index in 0..capacity {
            let at = slot_offset(index as usize);
            let word = Word::unpack(u64_at(bytes, at + SLOT_WORD));
            let pid = u64_at(bytes, at + SLOT_PID);
            if word == Word::default() && pid == 0 {
                continue;
            }
            let alive = alive(index);
            if word == Word::default() && !alive {
                continue;
            }
            held = held.saturating_add(word.total());
            held_alive = held_alive.saturating_add(if alive { word.total() } else { 0 });
            let name = bytes.get(at + SLOT_NAME..at + SLOT_NAME + SLOT_NAME_SIZE);
            let started = u64_at(bytes, at + SLOT_STARTED);
            let tags = bytes.get(at + SLOT_TAGS..at + SLOT_TAGS + tags::SIZE);
            slots.push(SlotSnapshot {
                index,
                pid: (pid & u64::from(u32::MAX)) as u32,
                started: time_of(started),
                name: shown(name.unwrap_or_default()),
                alive,
                used: u64::from(word.used) * UNIT,
                granted: u64::from(word.granted) * UNIT,
                peak: u64_at(bytes, at + SLOT_PEAK).saturating_mul(UNIT),
                memory: SlotMemory::of_bytes(bytes, index as usize),
                tags: tags.and_then(|record| tags::decode(record, started)),
                quota: match version {
                    VERSION_1 => Quota::default(),
                    _ => Quota::of_bytes(bytes, quota_offset(capacity, index as usize)),
                },
            });
        }
        let limit = u64::from(unpack_limit(u64_at(bytes, AT_LIMIT)).unwrap_or(0));
        Self {
            path,
            key,
            version,
            limit: limit * UNIT,
            free: limit.saturating_sub(held) * UNIT,
            // The word stays set until a request is served, even if the requesting processes have ended.
            pressure: u64_at(bytes, AT_PRESSURE) != 0
                && limit.saturating_sub(held_alive) < limit.div_ceil(8),
            capacity,
            slots,
        }
    }

    /// Returns the bytes that living processes have published as cached.
    pub fn cached(&self) -> u64 {
        self.memory().map(|memory| memory.cached).sum()
    }

    /// Returns the bytes that living processes have published as freed with pending work on streams.
    pub fn pending(&self) -> u64 {
        self.memory().map(|memory| memory.pending).sum()
    }

    fn memory(&self) -> impl Iterator<Item = SlotMemory> {
        self.slots.iter().filter(|slot| slot.alive).filter_map(|slot| slot.memory)
    }

    /// Returns the bytes in use by all slots.
    pub fn used(&self) -> u64 {
        self.slots.iter().map(|slot| slot.used).sum()
    }

    /// Returns the bytes of dead processes, used or granted. The next request that needs them reclaims them.
    pub fn left_by_the_dead(&self) -> u64 {
        let dead = self.slots.iter().filter(|slot| !slot.alive);
        dead.map(|slot| slot.used.saturating_add(slot.granted)).sum()
    }

    /// Returns the guaranteed bytes that living processes do not hold and others cannot take.
    pub fn kept_free(&self) -> u64 {
        let living = self.slots.iter().filter(|slot| slot.alive);
        living.map(|slot| slot.quota.guaranteed.saturating_sub(slot.used + slot.granted)).sum()
    }

    /// Returns the bytes granted to all slots and not in use.
    pub fn granted(&self) -> u64 {
        self.slots.iter().map(|slot| slot.granted).sum()
    }
}

impl SlotSnapshot {
    /// Returns the bytes of live blocks including the rounding to granules; `None` if the owner does not publish them.
    pub fn live(&self) -> Option<u64> {
        let memory = self.memory?;
        Some(self.used.saturating_sub(memory.cached).saturating_sub(memory.pending))
    }
}

impl SlotMemory {
    fn of_bytes(bytes: &[u8], index: usize) -> Option<Self> {
        let cached = u32_at(bytes, slot_offset(index) + SLOT_CACHED).checked_sub(1)?;
        let answer = AT_ANSWERS + index * ANSWER_SIZE;
        let (pending, answered) = match index < ANSWERS {
            true => (u32_at(bytes, answer + ANSWER_PENDING), u32_at(bytes, answer + ANSWER_NUMBER)),
            false => (0, u32_at(bytes, AT_ASKS) << 1),
        };
        Some(Self {
            cached: u64::from(cached) * UNIT,
            pending: u64::from(pending) * UNIT,
            has_answered: answered & !1 == u32_at(bytes, AT_ASKS) << 1,
        })
    }
}

impl Quota {
    /// The quota at an offset. A damaged part counts as missing.
    fn of_bytes(bytes: &[u8], at: usize) -> Self {
        let units = |offset| unpack_quota(u64_at(bytes, at + offset)).flatten();
        let stored = |offset| units(offset).map(|units| u64::from(units) * UNIT);
        let name = bytes.get(at + QUOTA_NAME..at + QUOTA_NAME + QUOTA_NAME_SIZE);
        Self {
            limit: stored(QUOTA_LIMIT),
            guaranteed: stored(QUOTA_GUARANTEED).unwrap_or(0),
            name: Some(shown(name.unwrap_or_default())).filter(|name| !name.is_empty()),
        }
    }
}

/// A stored name for display: up to the first zero, without characters that could control the terminal or reorder text.
pub(crate) fn shown(name: &[u8]) -> String {
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(name);
    text.chars().map(|letter| if is_unsafe(letter) { '?' } else { letter }).collect()
}

impl SlotTags {
    /// Returns the publication time, to a tenth of a second.
    pub fn published_at(&self) -> SystemTime {
        time_of(self.told)
    }
}

pub(crate) fn time_of(nanoseconds: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_nanos(nanoseconds)).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_steer_a_terminal() {
        assert_eq!(shown(b"worker\0rest"), "worker");
        assert_eq!(shown(b"\x1b[2Jx\n"), "?[2Jx?");
        assert_eq!(shown("a\u{202e}b\u{200b}".as_bytes()), "a?b?");
        assert_eq!(shown(&[0xff, b'a']), "\u{fffd}a");
        assert_eq!(shown(b""), "");
    }
}
