//! Forwarding for decorators, boxes and shared pointers.

use std::sync::Arc;

use super::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, BudgetReservation, DeviceBlock,
    DeviceMemoryResource, ResourceResult, StreamId,
};

/// Forwards the methods whose defaults do not forward to `$inner`, for a decorator that adds no bytes to a block.
macro_rules! forward_plain {
    ($self:ident, $inner:expr) => {
        #[inline]
        fn inner_resource(&$self) -> Option<&dyn DeviceMemoryResource> {
            Some(&$inner)
        }
        fn is_trusted(&$self, seal: crate::device_runtime::resource::Seal) -> bool {
            $inner.is_trusted(seal)
        }
        fn device_ordinal(&$self) -> u32 {
            $inner.device_ordinal()
        }
        fn bytes_outstanding(&$self) -> usize {
            $inner.bytes_outstanding()
        }
    };
}
pub(crate) use forward_plain;

/// Forwards the required methods, and those whose defaults are composed of single forms.
macro_rules! forward_pointer {
    () => {
        forward_plain!(self, **self);
        #[inline]
        fn allocate(
            &self,
            bytes: usize,
            stream: StreamId,
            tag: AllocTag,
        ) -> ResourceResult<DeviceBlock> {
            (**self).allocate(bytes, stream, tag)
        }
        #[inline]
        fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
            (**self).deallocate(block)
        }
        #[inline]
        fn deallocate_with_state(&self, block: &DeviceBlock) -> ResourceResult<BlockState> {
            (**self).deallocate_with_state(block)
        }
        fn finish_block_uses(
            &self,
            uses: &[(BlockId, Access)],
            stream: StreamId,
        ) -> ResourceResult<()> {
            (**self).finish_block_uses(uses, stream)
        }
        fn allocate_request(
            &self,
            request: AllocRequest,
            reservation: Option<&mut BudgetReservation>,
        ) -> ResourceResult<DeviceBlock> {
            (**self).allocate_request(request, reservation)
        }
    };
}

impl DeviceMemoryResource for Box<dyn DeviceMemoryResource + Send + Sync> {
    forward_pointer!();
}

impl DeviceMemoryResource for Arc<dyn DeviceMemoryResource + Send + Sync> {
    forward_pointer!();
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for Arc<R> {
    forward_pointer!();
}
