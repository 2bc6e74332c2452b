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

/// A point of a stream that others can wait for: the record of an event, a free, a synchronisation.
#[derive(Debug)]
pub(crate) struct Marker {
    pub(crate) stream: StreamHandle,
    pub(crate) sequence: u64,
    /// The work ordered before it, once that is known: it is not while a gate ahead of it is closed.
    pub(crate) reached: OnceLock<Reached>,
    done: AtomicBool,
}

/// The clock and time of a marker, once the work before it is analysed.
#[derive(Debug)]
pub(crate) struct Reached {
    pub(crate) epoch: Epoch,
    pub(crate) clock: Arc<VectorClock>,
    /// Simulated time at which the stream gets there.
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

/// A gate: the host's clock at the time it was opened.
#[derive(Debug, Default)]
pub(crate) struct GateState {
    pub(crate) opened: OnceLock<(Arc<VectorClock>, u64)>,
}

/// The memory that an argument named when it was queued.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Meant {
    /// A block that ends by a host call, and its generation.
    Plain(u64),
    /// A block that ends in stream order: the detector sees its end.
    Ordered,
    /// Addresses of a reservation, by its generation. The mappings behind them may change until it runs; those that
    /// allowed the access already when it was queued must not.
    Reserved { reservation: u64, mappings: Vec<u64> },
}

/// A range of device addresses as the caller gave it.
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
    /// Executed by the thread that waits for the bytes.
    CopyOut,
    Kernel(KernelBody),
    HostFn(HostFn),
    /// A marker on the stream: event record, synchronisation.
    Record(Arc<Marker>),
    Wait(Arc<Marker>),
    Gate(Arc<GateState>),
    /// The block in the first argument begins here.
    Alloc {
        completed: Vec<Arc<Marker>>,
    },
    /// The block in the first argument ends here.
    Free(Arc<Marker>),
    /// A copy whose caller stopped waiting.
    Cancelled,
}

impl OpKind {
    /// True for what runs without touching bytes or calling anyone.
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

/// The clock of an operation, in a form that is cheap to make.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    /// Right for every slot but the operation's own.
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

/// The description of an operation in reports.
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
    /// The clock of the host when it queued this.
    pub(crate) host: Arc<VectorClock>,
    pub(crate) issued: u64,
    /// Set by the analysis for operations that inform the host: host functions, by opening a gate, and copies to it.
    pub(crate) known: Option<Known>,
    /// Set by the analysis when an argument is not mapped: the access faults.
    pub(crate) fault: Option<String>,
}

impl Op {
    /// True when running both at once could have one see the other.
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
