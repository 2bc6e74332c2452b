//! The quota of a process: its limit and its guaranteed share.

use crate::error::{LedgerError, LedgerResult};
use crate::format::{MAX_LIMIT, QUOTA_NAME_SIZE, UNIT, pack_limit};

/// The quota of one process on a device, in addition to the device's limit.
///
/// ```
/// use xlog_ledger::Quota;
///
/// let quota = Quota::limited_to(10 << 30).with_guaranteed(4 << 30).with_name("training");
/// assert_eq!((quota.limit, quota.guaranteed), (Some(10 << 30), 4 << 30));
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Quota {
    /// The maximum bytes that the process may use, rounded down to [`UNIT`]; `None` applies only the device's limit.
    pub limit: Option<u64>,
    /// Bytes that others may not take while the process does not use them, rounded down to [`UNIT`].
    pub guaranteed: u64,
    /// The displayed name of the quota, such as a job's or a tenant's.
    pub name: Option<String>,
}

/// The stored form of a quota's numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct PackedQuota {
    pub(crate) limit: u64,
    pub(crate) guaranteed: u64,
}

impl Quota {
    /// Makes a quota with a limit in bytes.
    pub fn limited_to(bytes: u64) -> Self {
        Self { limit: Some(bytes), ..Self::default() }
    }

    xlog_base::setters! {
        /// Sets the limit, in bytes.
        with_limit(bytes: u64) { limit: Some(bytes) }
        /// Sets the bytes guaranteed to the process.
        with_guaranteed(bytes: u64) { guaranteed: bytes }
        /// Sets the name, of which at most 31 bytes are stored.
        with_name(name: impl Into<String>) { name: Some(name.into()) }
    }

    /// Returns true if it has neither a limit, nor a share, nor a name.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(crate) fn guaranteed_units(&self) -> u64 {
        self.guaranteed / UNIT
    }

    /// The stored form, or an error for a value that cannot be stored.
    pub(crate) fn pack(&self) -> LedgerResult<PackedQuota> {
        let units = |setting: &'static str, bytes: u64| {
            u32::try_from(bytes / UNIT).map_err(|_| LedgerError::Config {
                setting,
                value: format!("{bytes} bytes"),
                accepted: format!("0 to {MAX_LIMIT} bytes"),
            })
        };
        let limit = self.limit.map(|bytes| units("quota", bytes)).transpose()?;
        let guaranteed = units("guaranteed share", self.guaranteed)?;
        if limit.is_some_and(|limit| limit < guaranteed) {
            return Err(LedgerError::Config {
                setting: "guaranteed share",
                value: format!("{} bytes", self.guaranteed),
                accepted: format!("at most the quota, {} bytes", self.limit.unwrap_or(0)),
            });
        }
        Ok(PackedQuota {
            limit: limit.map_or(0, pack_limit),
            guaranteed: if guaranteed == 0 { 0 } else { pack_limit(guaranteed) },
        })
    }

    /// The stored form of the name: cut between characters, padded with zeroes, the last byte zero.
    pub(crate) fn name_bytes(&self) -> Vec<u8> {
        let name = self.name.as_deref().unwrap_or_default();
        let mut letters = Vec::with_capacity(QUOTA_NAME_SIZE);
        for letter in name.chars() {
            if letters.len() + letter.len_utf8() >= QUOTA_NAME_SIZE {
                break;
            }
            letters.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
        }
        letters.resize(QUOTA_NAME_SIZE, 0);
        letters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_that_cannot_be_stored_or_kept_is_refused() {
        let refused = |quota: Quota| match quota.pack() {
            Err(LedgerError::Config { setting, .. }) => setting,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(Quota::limited_to(MAX_LIMIT + UNIT)), "quota");
        assert_eq!(refused(Quota::default().with_guaranteed(u64::MAX)), "guaranteed share");
        assert_eq!(refused(Quota::limited_to(UNIT).with_guaranteed(2 * UNIT)), "guaranteed share");
        let whole = Quota::limited_to(2 * UNIT - 1).with_guaranteed(UNIT).pack().expect("fits");
        assert_eq!(whole, PackedQuota { limit: pack_limit(1), guaranteed: pack_limit(1) });
        assert_eq!(Quota::limited_to(0).pack().expect("nothing").limit, pack_limit(0));
        assert_eq!(Quota::default().pack().expect("none"), PackedQuota::default());
    }

    #[test]
    fn a_long_name_is_cut_between_letters() {
        let stored = |name: &str| Quota::default().with_name(name).name_bytes();
        assert_eq!(&stored("job")[..4], b"job\0");
        let long = stored(&"\u{e9}".repeat(20));
        assert_eq!(std::str::from_utf8(&long[..30]), Ok("\u{e9}".repeat(15).as_str()));
        assert_eq!(long[30..], [0, 0]);
    }
}
