//! The name of a device, which is also the name of its ledger file.

use std::fmt;

use crate::error::{LedgerError, LedgerResult};

/// The key of a device whose bytes are counted, for example a GPU's UUID.
///
/// It has 1 to 64 characters out of `A-Z a-z 0-9 . _ -`, and starts with a letter or a digit. Because it is a file name, other keys, which
/// could leave the directory or be hidden, are refused.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DeviceKey(String);

impl DeviceKey {
    /// The maximum length of a key.
    pub const MAX_LENGTH: usize = 64;

    /// Makes a key after validation.
    pub fn new(key: impl Into<String>) -> LedgerResult<Self> {
        let key = key.into();
        if Self::is_valid(key.as_bytes()) { Ok(Self(key)) } else { Err(LedgerError::Key { key }) }
    }

    /// Returns the key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn is_valid(key: &[u8]) -> bool {
        key.len() <= Self::MAX_LENGTH
            && key.first().is_some_and(u8::is_ascii_alphanumeric)
            && key.iter().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(byte))
    }
}

impl fmt::Display for DeviceKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_no_plain_file_name_are_refused() {
        for key in ["GPU-5a1b0c3e-0000-1111-2222-333344445555", "sim", "0", &"k".repeat(64)] {
            assert_eq!(DeviceKey::new(key).expect(key).as_str(), key);
        }
        for key in
            ["", ".", "..", ".hidden", "-x", "a/b", "a b", "a\0b", "a\n", "ä", &"k".repeat(65)]
        {
            let error = DeviceKey::new(key).expect_err(key);
            assert!(matches!(error, LedgerError::Key { .. }), "{key:?}: {error}");
        }
    }
}
