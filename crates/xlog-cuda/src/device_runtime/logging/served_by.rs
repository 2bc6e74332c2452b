//! The paths of an allocator, for logs.

/// The path of the allocator that served a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum ServedBy {
    /// Not recorded.
    #[default]
    Unknown,
    /// The driver itself.
    Driver,
    /// A per-stream magazine.
    Magazine,
    /// Free memory of the same stream.
    Own,
    /// Free memory of another stream that this one is already ordered after.
    Covered,
    /// Free memory of another stream, whose work has completed.
    Completed,
    /// New memory taken from the device.
    Grown,
    /// Free memory of another stream, after an inserted wait.
    Waited,
    /// Memory that a trim has freed.
    Trimmed,
    /// Memory that was free only after the host waited for pending frees.
    Reaped,
}

impl ServedBy {
    /// The number of paths.
    pub(crate) const COUNT: usize = Self::Reaped as usize + 1;
}

#[cfg(feature = "trace")]
impl From<ServedBy> for xlog_trace::ServedBy {
    #[inline]
    fn from(path: ServedBy) -> Self {
        match path {
            ServedBy::Unknown => Self::Unknown,
            ServedBy::Driver => Self::Driver,
            ServedBy::Magazine => Self::Magazine,
            ServedBy::Own => Self::Own,
            ServedBy::Covered => Self::Covered,
            ServedBy::Completed => Self::Completed,
            ServedBy::Grown => Self::Grown,
            ServedBy::Waited => Self::Waited,
            ServedBy::Trimmed => Self::Trimmed,
            ServedBy::Reaped => Self::Reaped,
        }
    }
}
