//! Measures the stream-ordered resource of the published crate `xlog-cuda` on the comparison's workloads (docs/benchmarks.md).

#[path = "../../../../crates/xlog-cuda/benches/peers/generators.rs"]
mod generators;
#[path = "../../../../crates/xlog-cuda/benches/peers/random.rs"]
mod random;
#[path = "../../../../crates/xlog-cuda/benches/peers/replay.rs"]
mod replay;
#[path = "../../../../crates/xlog-cuda/benches/peers/rows.rs"]
mod rows;
#[path = "../../../../crates/xlog-cuda/benches/peers/serve.rs"]
mod serve;
#[path = "../../../../crates/xlog-cuda/benches/peers/streams.rs"]
mod streams;
#[path = "../../../../crates/xlog-cuda/benches/peers/workloads.rs"]
mod workloads;

use std::process::ExitCode;
use std::sync::Arc;

use published::CudaDevice;
use published::device_runtime::{
    AllocTag, AsyncCudaResource, DeviceBlock, DeviceMemoryResource, StreamId, StreamPool,
};
use rows::Options;
use workloads::{Maker, Peer};

const STREAMS: usize = 32;

struct Published {
    resource: AsyncCudaResource,
    streams: Arc<StreamPool>,
}

impl Peer for Published {
    type Stream = StreamId;
    type Block = DeviceBlock;
    type Failure = ();

    fn stream(&self) -> Result<StreamId, String> {
        self.streams.acquire().map_err(|error| format!("{error:?}"))
    }

    fn allocate(&self, bytes: usize, stream: &StreamId) -> Result<DeviceBlock, ()> {
        self.resource.allocate(bytes, *stream, AllocTag("bench")).map_err(|_| ())
    }

    fn free(&self, block: DeviceBlock) {
        if let Err(error) = self.resource.deallocate(block) {
            eprintln!("a free failed: {error:?}");
        }
    }

    fn free_elsewhere(&self, block: DeviceBlock, _: &StreamId, used: &StreamId) -> Result<(), String> {
        self.resource.record_block_use(&block, *used).map_err(|error| format!("{error:?}"))?;
        self.resource.deallocate(block).map_err(|error| format!("{error:?}"))
    }

    fn spin(&self, _: &StreamId, _: &DeviceBlock, _: u64) -> Result<(), String> {
        Err("built without its kernels, and its streams launch no others".to_owned())
    }

    fn synchronize(&self) {
        if let Err(error) = self.resource.reap_pending() {
            eprintln!("a reap failed: {error:?}");
        }
    }
}

struct PublishedMaker(Arc<CudaDevice>);

impl Maker for PublishedMaker {
    type Peer = Published;

    fn make(&self, _grows: bool) -> Result<Published, String> {
        let streams = Arc::new(StreamPool::new(self.0.clone(), STREAMS));
        Ok(Published { resource: AsyncCudaResource::new(self.0.clone(), 0, streams.clone()), streams })
    }

    fn taken_and_total(&self) -> Option<(u64, u64)> {
        None
    }
}

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(reason) => {
            eprintln!("published: {reason}");
            return ExitCode::from(2);
        }
    };
    let device = match CudaDevice::new(0) {
        Ok(device) => Arc::new(device),
        Err(error) => {
            eprintln!("published: no device: {error}");
            return ExitCode::FAILURE;
        }
    };
    serve::serve(&options, "published", |variant| match variant {
        "async" => Ok(PublishedMaker(device.clone())),
        _ => Err(format!("there is no variant '{variant}'")),
    });
    ExitCode::SUCCESS
}
