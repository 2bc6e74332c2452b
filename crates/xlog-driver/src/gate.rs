//! The gate that blocks a held stream.

use std::fmt;

/// Blocks the work queued on a stream after [`Driver::hold`](crate::Driver::hold), until released or dropped.
///
/// Releasing never blocks and is allowed on any thread.
#[must_use = "dropping the gate releases the stream at once"]
pub struct Gate {
    release: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Gate {
    /// Makes a gate that calls `release` exactly once.
    pub fn new(release: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { release: Some(Box::new(release)) }
    }

    /// Lets the stream continue.
    pub fn release(self) {
        drop(self);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release();
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gate(held)")
    }
}
