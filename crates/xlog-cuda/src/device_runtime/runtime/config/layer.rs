//! A layer that the user adds to a stack.

use std::fmt;
use std::sync::Arc;

use crate::device_runtime::resource::DeviceMemoryResource;

type BoxedResource = Box<dyn DeviceMemoryResource + Send + Sync>;

/// A function that wraps a stack in one more layer. Clones are equal.
#[derive(Clone)]
pub struct Layer(Arc<dyn Fn(BoxedResource) -> BoxedResource + Send + Sync>);

impl Layer {
    pub(super) fn new(
        wrap: impl Fn(BoxedResource) -> BoxedResource + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(wrap))
    }

    pub(crate) fn wrap(&self, inner: BoxedResource) -> BoxedResource {
        (self.0)(inner)
    }
}

impl PartialEq for Layer {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Layer {}

impl fmt::Debug for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Layer")
    }
}
