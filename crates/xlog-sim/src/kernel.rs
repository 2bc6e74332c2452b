//! Simulated kernels: a closure with declared ranges.

use std::fmt;
use std::sync::Arc;

use xlog_driver::Access;

/// The body of a kernel that a graph may repeat.
pub(crate) type RepeatableBody = dyn Fn(&mut KernelArgs<'_>) + Send + Sync;

/// The body of a kernel.
pub(crate) enum KernelBody {
    Once(Box<dyn FnOnce(&mut KernelArgs<'_>) + Send>),
    Repeatable(Arc<RepeatableBody>),
}

impl KernelBody {
    pub(crate) fn run(self, args: &mut KernelArgs<'_>) {
        match self {
            Self::Once(body) => body(args),
            Self::Repeatable(body) => body(args),
        }
    }
}

/// A kernel for a simulated stream.
///
/// The body gets only its declared ranges, so it cannot touch memory without the race detector's knowledge.
///
/// ```
/// use xlog_driver::{Access, Driver};
/// use xlog_sim::{SimConfig, SimDevice, SimKernel};
///
/// let device = SimDevice::open(SimConfig::default())?;
/// let stream = device.stream_create(0)?;
/// let numbers = device.alloc(4)?;
/// device.launch(
///     stream,
///     SimKernel::new("fill", |args| {
///         for (i, byte) in args.bytes_mut(0).iter_mut().enumerate() {
///             *byte = i as u8;
///         }
///     })
///     .arg(numbers, 4, Access::Write),
/// )?;
/// let mut back = [0; 4];
/// // SAFETY: `numbers` is live and four bytes long.
/// unsafe { device.copy_dtoh(&mut back, numbers, stream)? };
/// assert_eq!(back, [0, 1, 2, 3]);
/// # Ok::<(), xlog_driver::DriverError>(())
/// ```
pub struct SimKernel {
    pub(crate) name: Arc<str>,
    pub(crate) ranges: Vec<KernelRange>,
    pub(crate) body: KernelBody,
}

/// A declared range of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct KernelRange {
    pub(crate) ptr: u64,
    pub(crate) bytes: usize,
    pub(crate) access: Access,
}

impl SimKernel {
    /// Makes a kernel that runs once. Reports show its name.
    pub fn new(
        name: impl Into<Arc<str>>,
        body: impl FnOnce(&mut KernelArgs<'_>) + Send + 'static,
    ) -> Self {
        Self { name: name.into(), ranges: Vec::new(), body: KernelBody::Once(Box::new(body)) }
    }

    /// Makes a kernel whose body can run repeatedly, as captures require.
    pub fn repeatable(
        name: impl Into<Arc<str>>,
        body: impl Fn(&mut KernelArgs<'_>) + Send + Sync + 'static,
    ) -> Self {
        let body = KernelBody::Repeatable(Arc::new(body));
        Self { name: name.into(), ranges: Vec::new(), body }
    }

    /// Declares the next argument. Arguments may overlap only if all overlapping ones are read-only.
    #[must_use]
    pub fn arg(mut self, ptr: u64, bytes: usize, access: Access) -> Self {
        self.ranges.push(KernelRange { ptr, bytes, access });
        self
    }
}

impl fmt::Debug for SimKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimKernel")
            .field("name", &self.name)
            .field("ranges", &self.ranges)
            .finish_non_exhaustive()
    }
}

/// One argument of a running kernel.
#[derive(Debug)]
pub enum KernelSlice<'a> {
    /// Declared as read.
    Read(&'a [u8]),
    /// Declared as written, or read and written.
    Write(&'a mut [u8]),
}

/// The arguments of a running kernel, in the order of their declaration.
#[derive(Debug)]
pub struct KernelArgs<'a> {
    pub(crate) slices: Vec<KernelSlice<'a>>,
}

impl<'a> KernelArgs<'a> {
    /// Returns the number of declared arguments.
    pub fn len(&self) -> usize {
        self.slices.len()
    }

    /// True if no argument was declared.
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }

    /// Returns the bytes of argument `index`; empty if there is no such argument.
    #[must_use]
    pub fn bytes(&self, index: usize) -> &[u8] {
        match self.slices.get(index) {
            Some(KernelSlice::Read(bytes)) => bytes,
            Some(KernelSlice::Write(bytes)) => bytes,
            None => &[],
        }
    }

    /// Returns the writable bytes of argument `index`; empty if there is no such argument or it was declared as read.
    pub fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        match self.slices.get_mut(index) {
            Some(KernelSlice::Write(bytes)) => bytes,
            _ => &mut [],
        }
    }

    /// Returns all arguments at once, for bodies that read one while writing another.
    pub fn slices(&mut self) -> &mut [KernelSlice<'a>] {
        &mut self.slices
    }
}
