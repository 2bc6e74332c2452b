//! The operations of a simulated stream.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use xlog_driver::{Access, HostFn, StreamHandle};

use crate::clock::{Epoch, VectorClock};
use crate::kernel::KernelBody;
use crate::memory::BackingRange;

/// The name of an operation in reports.
#[derive(Clone)]
pub(crate) enum Label {
    Fixed(&'static str),
    Given(Arc<str>),
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fixed(name) => name,
            Self::Given(name) => name,
        })
    }
}

/// A point of a stream that others can wait for: an event record, a free or a synchronisation.
#[derive(Debug)]
pub(crate) struct Marker {
    pub(crate) stream: StreamHandle,
    pub(crate) sequence: u64,
    /// The clock of the marker, set by the analysis. It is unset while a gate ahead of the marker is closed.
    pub(crate) reached: OnceLock<Reached>,
    done: AtomicBool,
}

/// The clock and time of a marker, once the work before it is analysed.
#[derive(Debug)]
pub(crate) struct Reached {
    pub(crate) epoch: Epoch,
    pub(crate) clock: Arc<VectorClock>,
    /// The simulated time at which the stream reaches the marker.
    pub(crate) time: u64,
}

impl Marker {
    pub(crate) fn new(stream: StreamHandle, sequence: u64) -> Arc<Self> {
        Arc::new(Self { stream, sequence, reached: OnceLock::new(), done: AtomicBool::new(false) })
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(crate) fn set_done(&self) {
        self.done.store(true, Ordering::Release);
    }
}

/// A gate, with the clock and time of the thread that opened it.
#[derive(Debug, Default)]
pub(crate) struct GateState {
    pub(crate) opened: OnceLock<(Arc<VectorClock>, u64)>,
}

/// The memory that an argument named when it was queued.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Meant {
    /// A block that a host call frees, by its generation.
    Plain(u64),
    /// A block that is freed in stream order; the detector sees its free.
    Ordered,
    /// Addresses of a reservation, by its generation. The mappings behind them may change until the work runs, except `mappings`, which
    /// already allowed the access when it was queued.
    Reserved { reservation: u64, mappings: Vec<u64> },
}

/// A range of device addresses of an operation.
#[derive(Clone, Debug)]
pub(crate) struct Argument {
    pub(crate) ptr: u64,
    pub(crate) bytes: u64,
    pub(crate) access: Access,
    pub(crate) meant: Meant,
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) pieces: Vec<BackingRange>,
}

pub(crate) enum OpKind {
    Memset(u8),
    CopyIn(Box<[u8]>),
    CopyDevice,
    /// A copy that the thread waiting for the bytes executes.
    CopyOut,
    Kernel(KernelBody),
    HostFn(HostFn),
    /// A marker for an event record or a synchronisation.
    Record(Arc<Marker>),
    Wait(Arc<Marker>),
    Gate(Arc<GateState>),
    /// The allocation of the block in the first argument.
    Alloc {
        completed: Vec<Arc<Marker>>,
    },
    /// The free of the block in the first argument.
    Free(Arc<Marker>),
    /// A copy whose caller no longer waits.
    Cancelled,
}

impl OpKind {
    /// True if the operation touches no bytes and calls no closure.
    pub(crate) fn is_immediate(&self) -> bool {
        matches!(
            self,
            Self::Record(_)
                | Self::Wait(_)
                | Self::Gate(_)
                | Self::Alloc { .. }
                | Self::Free(_)
                | Self::Cancelled
        )
    }
}

/// The clock of an operation in a form that is cheap to make.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    /// Valid for every slot except the operation's own.
    pub(crate) others: Arc<VectorClock>,
    pub(crate) epoch: Epoch,
    pub(crate) time: u64,
}

impl Known {
    pub(crate) fn clock(&self) -> VectorClock {
        let mut clock = VectorClock::clone(&self.others);
        clock.set(self.epoch.slot, self.epoch.count);
        clock
    }
}

/// The part of an operation that reports show.
pub(crate) struct OpMeta {
    pub(crate) sequence: u64,
    pub(crate) label: Label,
    pub(crate) stream: Option<StreamHandle>,
    pub(crate) stream_name: Option<Arc<str>>,
    /// The device of the stream.
    pub(crate) ordinal: u32,
}

/// One queued operation.
pub(crate) struct Op {
    pub(crate) meta: Arc<OpMeta>,
    pub(crate) kind: OpKind,
    pub(crate) arguments: Vec<Argument>,
    /// The clock of the host when it queued the operation.
    pub(crate) host: Arc<VectorClock>,
    pub(crate) issued: u64,
    /// Set by the analysis for operations that order the host: host functions, which may open gates, and copies to the host.
    pub(crate) known: Option<Known>,
    /// Set by the analysis if an argument is not mapped: the access faults.
    pub(crate) fault: Option<String>,
}

impl Op {
    /// True if both operations may touch the same bytes and one of them writes.
    pub(crate) fn conflicts(&self, other: &[(BackingRange, bool)]) -> bool {
        self.arguments.iter().any(|argument| {
            argument.pieces.iter().any(|mine| {
                other.iter().any(|(theirs, writes)| {
                    (*writes || argument.access.writes()) && mine.overlaps(theirs)
                })
            })
        })
    }

    pub(crate) fn touched(&self) -> Vec<(BackingRange, bool)> {
        let pieces = |argument: &Argument| {
            let writes = argument.access.writes();
            argument.pieces.iter().map(move |piece| (piece.clone(), writes)).collect::<Vec<_>>()
        };
        self.arguments.iter().flat_map(pieces).collect()
    }
}
