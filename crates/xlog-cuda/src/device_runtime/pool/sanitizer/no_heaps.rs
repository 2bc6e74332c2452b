//! Heaps in a build without the feature `nvtx`: no pool has any.

use crate::device_runtime::resource::{ResourceError, ResourceResult};

#[derive(Debug)]
pub(crate) enum Heaps {}

impl Heaps {
    /// Refuses: this build cannot report to a checker.
    pub(super) fn of_tool(name: String) -> ResourceResult<Option<Self>> {
        Err(ResourceError::InvalidRequest {
            value: format!("sanitizer = on for {name} in a program built without NVTX"),
            accepted: "a build with the feature `nvtx` of xlog-cuda".to_owned(),
        })
    }

    pub(crate) fn begin(&self, _ptr: u64, _bytes: u64) {
        match *self {}
    }

    pub(crate) fn end(&self, _ptr: u64) {
        match *self {}
    }

    pub(super) fn begin_region(&self, _ptr: u64, _bytes: usize, _name: &str) -> bool {
        match *self {}
    }

    pub(super) fn end_region(&self, _ptr: u64) {
        match *self {}
    }

    pub(super) fn counts(&self) -> (usize, usize, usize) {
        match *self {}
    }
}
