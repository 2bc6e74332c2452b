//! Uses of blocks by the library's own copies and fills.
//!
//! Safe code can name every block: another thread may close the use of a running copy, and free its block, at any time. So:
//! - The block is pinned ([`DeviceMemoryResource::while_live`]) until its work is queued and recorded; a free completes afterwards.
//! - If another thread closed the use, perhaps before the work was queued, the work is recorded again, or the host waits for it.
//! - A panic closes the use.

use crate::device_runtime::resource::{
    Access, BlockId, DeviceBlock, DeviceMemoryResource, ResourceError, ResourceResult, StreamId,
};
use crate::device_runtime::runtime::catch_panic;
use crate::{DeviceStream, Result};

/// A use of a block on a stream.
#[derive(Clone, Copy)]
pub(crate) struct BlockUse<'a> {
    pub(crate) resource: &'a dyn DeviceMemoryResource,
    pub(crate) block: &'a DeviceBlock,
    pub(crate) stream: StreamId,
    pub(crate) queue: &'a DeviceStream,
    pub(crate) access: Access,
}

impl BlockUse<'_> {
    /// Runs `work`, which queues work on the stream, within this use. The resource must track uses.
    pub(crate) fn run(self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        self.run_live(|| {
            self.resource.prepare_block_use(self.id(), self.stream, self.access)?;
            let open = OpenUse(Some(self));
            let worked = work();
            let closed = open.close();
            worked?;
            Ok(closed?)
        })
    }

    /// Runs `work` while the block cannot be freed.
    pub(crate) fn run_live(self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut work = Some(work);
        let mut worked = None;
        self.resource.while_live(self.id(), &mut || {
            if let Some(work) = work.take() {
                worked = Some(work());
            }
        })?;
        let left_out = || ResourceError::Driver("while_live did not run the work".to_owned());
        worked.ok_or_else(left_out)?
    }

    fn id(&self) -> BlockId {
        BlockId::from_block(self.block)
    }

    /// Closes the use. If another thread has closed it, records the work, or else waits for it.
    fn finish(&self) -> ResourceResult<()> {
        let finished = self.resource.finish_block_use(self.id(), self.stream, self.access);
        if let Err(ResourceError::StreamMisuse(_) | ResourceError::UseAfterFree { .. }) = finished
            && self.resource.record_block_use(self.block, self.stream).is_err()
        {
            // The error of the use is more useful than one of this wait.
            let _ = self.queue.synchronize();
        }
        finished
    }
}

/// An open use; the drop closes it.
struct OpenUse<'a>(Option<BlockUse<'a>>);

impl OpenUse<'_> {
    fn close(mut self) -> ResourceResult<()> {
        self.0.take().map_or(Ok(()), |open| open.finish())
    }
}

impl Drop for OpenUse<'_> {
    fn drop(&mut self) {
        if let Some(open) = self.0.take() {
            catch_panic(|| open.finish());
        }
    }
}
