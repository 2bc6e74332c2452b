//! The effective limit: the smallest of several.

use std::fmt;

/// The source of a limit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LimitSource {
    /// Code or environment.
    Configuration,
    /// The ledger that processes share.
    Ledger,
    /// The total that the driver reports.
    Driver,
    /// The memory of the device, less a reserve.
    DeviceReserve,
}

impl fmt::Display for LimitSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Configuration => "configuration",
            Self::Ledger => "ledger",
            Self::Driver => "driver",
            Self::DeviceReserve => "device total less reserve",
        })
    }
}

/// The smallest of several limits, and its source.
///
/// ```
/// use xlog_cuda::device_runtime::{EffectiveLimit, LimitSource};
///
/// let limit = EffectiveLimit::device(16 << 30, 1 << 30)
///     .and(LimitSource::Configuration, Some(8 << 30))
///     .and(LimitSource::Ledger, None);
/// assert_eq!((limit.bytes(), limit.ruled_by()), (8 << 30, LimitSource::Configuration));
/// assert_eq!(limit.to_string(), "8589934592 bytes by configuration (device total less reserve: 16106127360)");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EffectiveLimit {
    limits: Vec<(LimitSource, usize)>,
}

impl EffectiveLimit {
    /// Starts with the memory of a device less a reserve for contexts, displays and libraries.
    #[must_use]
    pub fn device(total: usize, reserve: usize) -> Self {
        Self { limits: vec![(LimitSource::DeviceReserve, total.saturating_sub(reserve))] }
    }

    /// Starts with a configured limit.
    #[must_use]
    pub fn configured(bytes: usize) -> Self {
        Self { limits: vec![(LimitSource::Configuration, bytes)] }
    }

    /// Adds a limit, if there is one.
    #[must_use]
    pub fn and(mut self, source: LimitSource, bytes: Option<usize>) -> Self {
        self.limits.extend(bytes.map(|bytes| (source, bytes)));
        self
    }

    /// Returns the smallest limit; of equal limits the first.
    fn ruling(&self) -> (LimitSource, usize) {
        let least = self.limits.iter().min_by_key(|(_, bytes)| *bytes);
        least.copied().unwrap_or((LimitSource::Configuration, usize::MAX))
    }

    /// The limit.
    pub fn bytes(&self) -> usize {
        self.ruling().1
    }

    /// The source of the limit.
    pub fn ruled_by(&self) -> LimitSource {
        self.ruling().0
    }

    /// All limits that were set.
    pub fn limits(&self) -> &[(LimitSource, usize)] {
        &self.limits
    }
}

impl fmt::Display for EffectiveLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (source, bytes) = self.ruling();
        write!(f, "{bytes} bytes by {source}")?;
        let mut others = self.limits.iter().filter(|(other, _)| *other != source).peekable();
        if others.peek().is_none() {
            return Ok(());
        }
        let others: Vec<String> =
            others.map(|(source, bytes)| format!("{source}: {bytes}")).collect();
        write!(f, " ({})", others.join(", "))
    }
}
