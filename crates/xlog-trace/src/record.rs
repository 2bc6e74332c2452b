//! A record of the log: a `Copy` struct of fixed size, whose strings are interned numbers.
//!
//! An absent value costs a presence bit, not a discriminant: a record takes 104 bytes in a ring and 80 or 88 in a
//! file. [`Names`](crate::Names) holds the strings.

use crate::action::{Action, ServedBy, UseAccess};
use crate::names::NameId;
use crate::stacks::StackId;

pub(crate) const HAS_STREAM: u8 = 1 << 0;
pub(crate) const HAS_PTR: u8 = 1 << 1;
pub(crate) const HAS_BYTES: u8 = 1 << 2;
pub(crate) const HAS_GRANTED: u8 = 1 << 3;
pub(crate) const HAS_GENERATION: u8 = 1 << 4;
pub(crate) const HAS_QUERY: u8 = 1 << 5;
const ACCESS_SHIFT: u8 = 6;

/// An error: the names of its kind and of its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Failure {
    /// The error's kind, a short stable word.
    pub kind: NameId,
    /// The error's text.
    pub message: NameId,
}

/// One operation of an allocator.
///
/// Absent fields hold zero, so equal records have equal contents.
///
/// ```
/// use xlog_trace::{Action, Record};
///
/// let block = Record::new(Action::Allocate, 0, 1, 250).with_ptr(0x7f00).with_bytes(4096);
/// assert_eq!((block.bytes(), block.stream()), (Some(4096), None));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Record {
    pub(crate) order: u64,
    pub(crate) time: u64,
    pub(crate) thread: u64,
    pub(crate) ptr: u64,
    pub(crate) bytes: u64,
    pub(crate) granted: u64,
    pub(crate) generation: u64,
    pub(crate) query: u64,
    pub(crate) stream: u32,
    pub(crate) tag: u32,
    pub(crate) latency: u32,
    pub(crate) device: u32,
    pub(crate) process: u32,
    pub(crate) error_kind: u32,
    pub(crate) error_message: u32,
    pub(crate) site: u32,
    pub(crate) stack: u32,
    pub(crate) action: u8,
    pub(crate) path: u8,
    /// Binary logarithm of the alignment plus one; zero when absent.
    pub(crate) alignment: u8,
    pub(crate) flags: u8,
}

/// Defines the getters and setters of optional values.
macro_rules! optional {
    ($($(#[$doc:meta])* $get:ident, $set:ident: $kind:ty = $field:ident if $flag:ident;)*) => {$(
        $(#[$doc])*
        pub const fn $get(&self) -> Option<$kind> {
            if self.flags & $flag != 0 { Some(self.$field) } else { None }
        }

        #[doc = concat!("Sets [`", stringify!($get), "`](Self::", stringify!($get), ").")]
        #[must_use]
        pub const fn $set(mut self, value: $kind) -> Self {
            self.$field = value;
            self.flags |= $flag;
            self
        }
    )*};
}

/// All values of a record; see [`Record::from_fields`]. The methods of the record define their meaning.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Fields {
    pub action: Action,
    pub device: u32,
    pub order: u64,
    pub time_nanos: u64,
    pub thread: u64,
    pub process: u32,
    pub stream: Option<u32>,
    pub ptr: Option<u64>,
    pub bytes: Option<u64>,
    pub granted: Option<u64>,
    pub alignment: Option<u64>,
    pub tag: Option<NameId>,
    pub query_id: Option<u64>,
    pub generation: Option<u64>,
    pub latency_nanos: u64,
    pub served_by: ServedBy,
    pub access: Option<UseAccess>,
    pub failure: Option<Failure>,
    pub site: Option<NameId>,
    pub stack: Option<StackId>,
}

/// Returns the logarithm of a power of two plus one; 0 for another number.
#[inline(always)]
fn alignment_code(alignment: u64) -> u8 {
    if alignment.is_power_of_two() { alignment.trailing_zeros() as u8 + 1 } else { 0 }
}

impl Record {
    /// Creates a record from all its values, without branches, for hot paths.
    #[inline(always)]
    pub fn from_fields(fields: Fields) -> Self {
        let flag = |is_there: bool, bit: u8| if is_there { bit } else { 0 };
        let access = fields.access.map_or(0, UseAccess::bits);
        Self {
            order: fields.order,
            time: fields.time_nanos,
            thread: fields.thread,
            ptr: fields.ptr.unwrap_or(0),
            bytes: fields.bytes.unwrap_or(0),
            granted: fields.granted.unwrap_or(0),
            generation: fields.generation.unwrap_or(0),
            query: fields.query_id.unwrap_or(0),
            stream: fields.stream.unwrap_or(0),
            tag: fields.tag.map_or(0, NameId::raw),
            latency: u32::try_from(fields.latency_nanos).unwrap_or(u32::MAX),
            device: fields.device,
            process: fields.process,
            error_kind: fields.failure.map_or(0, |failure| failure.kind.raw()),
            error_message: fields.failure.map_or(0, |failure| failure.message.raw()),
            site: fields.site.map_or(0, NameId::raw),
            stack: fields.stack.map_or(0, StackId::raw),
            action: fields.action.code(),
            path: fields.served_by.code(),
            alignment: alignment_code(fields.alignment.unwrap_or(0)),
            flags: flag(fields.stream.is_some(), HAS_STREAM)
                | flag(fields.ptr.is_some(), HAS_PTR)
                | flag(fields.bytes.is_some(), HAS_BYTES)
                | flag(fields.granted.is_some(), HAS_GRANTED)
                | flag(fields.generation.is_some(), HAS_GENERATION)
                | flag(fields.query_id.is_some(), HAS_QUERY)
                | access << ACCESS_SHIFT,
        }
    }

    /// Creates a record of `action` on `device`, the `order`-th of its log, `time_nanos` after the epoch in the log's header.
    pub fn new(action: Action, device: u32, order: u64, time_nanos: u64) -> Self {
        Self { order, time: time_nanos, device, action: action.code(), ..Self::default() }
    }

    /// Returns the operation.
    pub const fn action(&self) -> Action {
        Action::from_code(self.action)
    }

    /// Returns the ordinal of the device.
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// Returns the position in the history of the whole process: strictly increasing, with gaps allowed.
    pub const fn order(&self) -> u64 {
        self.order
    }

    /// Returns when the call began, in nanoseconds since the epoch in the log's header.
    pub const fn time_nanos(&self) -> u64 {
        self.time
    }

    /// Returns the calling thread.
    pub const fn thread(&self) -> u64 {
        self.thread
    }

    /// Returns the calling process.
    pub const fn process(&self) -> u32 {
        self.process
    }

    optional! {
        /// The stream the call was ordered on.
        stream, with_stream: u32 = stream if HAS_STREAM;
        /// Device address of the block.
        ptr, with_ptr: u64 = ptr if HAS_PTR;
        /// The requested bytes.
        bytes, with_bytes: u64 = bytes if HAS_BYTES;
        /// The bytes charged for the block: the granted bytes, at least the requested ones.
        granted, with_granted: u64 = granted if HAS_GRANTED;
        /// The query that the thread worked for.
        query_id, with_query_id: u64 = query if HAS_QUERY;
        /// Distinguishes a block from later ones at the same address.
        generation, with_generation: u64 = generation if HAS_GENERATION;
    }

    /// Returns the alignment of the request, a power of two.
    pub const fn alignment(&self) -> Option<u64> {
        match self.alignment {
            0 => None,
            log => 1u64.checked_shl(log as u32 - 1),
        }
    }

    /// Returns the tag of the allocation.
    pub const fn tag(&self) -> Option<NameId> {
        NameId::from_raw(self.tag)
    }

    /// Returns the duration of the call, saturated at `u32::MAX`.
    pub const fn latency_nanos(&self) -> u32 {
        self.latency
    }

    /// Returns the path that served the request.
    pub const fn served_by(&self) -> ServedBy {
        ServedBy::from_code(self.path)
    }

    /// Returns the access, in records of uses.
    pub const fn access(&self) -> Option<UseAccess> {
        UseAccess::from_bits(self.flags >> ACCESS_SHIFT)
    }

    /// Returns the error, if the call failed and the log has it.
    pub const fn failure(&self) -> Option<Failure> {
        match (NameId::from_raw(self.error_kind), NameId::from_raw(self.error_message)) {
            (Some(kind), Some(message)) => Some(Failure { kind, message }),
            _ => None,
        }
    }

    /// Returns the source location of the call, as `file:line`.
    pub const fn site(&self) -> Option<NameId> {
        NameId::from_raw(self.site)
    }

    /// Returns the stack of the call, if it was sampled.
    pub const fn stack(&self) -> Option<StackId> {
        StackId::from_raw(self.stack)
    }

    /// Returns whether the call failed.
    pub const fn is_failure(&self) -> bool {
        self.error_kind != 0 || matches!(self.action(), Action::AllocateFailure)
    }

    /// Returns the bytes that the block is counted with: the granted bytes, or else the requested ones.
    pub const fn charged_bytes(&self) -> u64 {
        if self.flags & HAS_GRANTED != 0 { self.granted } else { self.bytes }
    }

    xlog_base::setters! {
        /// Sets the thread.
        with_thread(thread: u64) { thread: thread }
        /// Sets the time.
        with_time_nanos(nanos: u64) { time: nanos }
        /// Sets the process. A recorder fills in its own.
        with_process(process: u32) { process: process }
        /// Sets the alignment; one that is not a power of two is ignored.
        with_alignment(alignment: u64) { alignment: alignment_code(alignment) }
        /// Sets the tag.
        with_tag(tag: NameId) { tag: tag.raw() }
        /// Sets the duration of the call, saturating.
        with_latency_nanos(nanos: u64) { latency: u32::try_from(nanos).unwrap_or(u32::MAX) }
        /// Sets the path that served the request.
        with_served_by(path: ServedBy) { path: path.code() }
        /// Sets the source location of the call.
        with_site(site: NameId) { site: site.raw() }
        /// Sets the stack of the call.
        with_stack(stack: StackId) { stack: stack.raw() }
    }

    /// Sets the access of a use.
    #[must_use]
    pub const fn with_access(mut self, access: UseAccess) -> Self {
        self.flags = (self.flags & !(3 << ACCESS_SHIFT)) | (access.bits() << ACCESS_SHIFT);
        self
    }

    /// Marks the record as a failure.
    #[must_use]
    pub const fn with_failure(mut self, failure: Failure) -> Self {
        self.error_kind = failure.kind.raw();
        self.error_message = failure.message.raw();
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_104_bytes_in_a_ring() {
        assert_eq!(size_of::<Record>(), 104);
    }

    #[test]
    fn absent_values_are_absent_and_zero_is_a_value() {
        let bare = Record::new(Action::Allocate, 0, 1, 2);
        assert_eq!((bare.ptr(), bare.stream(), bare.query_id()), (None, None, None));
        let zero = bare.with_ptr(0).with_stream(0).with_query_id(0).with_granted(0);
        assert_eq!((zero.ptr(), zero.stream(), zero.query_id()), (Some(0), Some(0), Some(0)));
        assert_ne!(bare, zero);
        assert_eq!(bare.with_alignment(1).alignment(), Some(1));
        assert_eq!(bare.with_alignment(1 << 63).alignment(), Some(1 << 63));
        assert_eq!(bare.with_alignment(24).alignment(), None);
        assert_eq!(bare.with_latency_nanos(u64::MAX).latency_nanos(), u32::MAX);
    }

    #[test]
    fn a_record_made_in_one_piece_equals_one_made_by_steps() {
        let bare = Fields {
            action: Action::Deallocate,
            device: 3,
            order: 4,
            time_nanos: 5,
            thread: 6,
            process: 7,
            stream: None,
            ptr: None,
            bytes: None,
            granted: None,
            alignment: None,
            tag: None,
            query_id: None,
            generation: None,
            latency_nanos: u64::MAX,
            served_by: ServedBy::Own,
            access: None,
            failure: None,
            site: None,
            stack: None,
        };
        let steps = Record::new(Action::Deallocate, 3, 4, 5)
            .with_thread(6)
            .with_process(7)
            .with_latency_nanos(u64::MAX)
            .with_served_by(ServedBy::Own);
        assert_eq!(Record::from_fields(bare), steps);
        let name = NameId::LOST;
        let full = Fields {
            stream: Some(1),
            ptr: Some(2),
            bytes: Some(3),
            granted: Some(0),
            alignment: Some(256),
            tag: Some(name),
            query_id: Some(0),
            generation: Some(9),
            access: Some(UseAccess::ReadWrite),
            failure: Some(Failure { kind: name, message: name }),
            site: Some(name),
            stack: Some(StackId::LOST),
            ..bare
        };
        let steps = steps
            .with_stream(1)
            .with_ptr(2)
            .with_bytes(3)
            .with_granted(0)
            .with_alignment(256)
            .with_tag(name)
            .with_query_id(0)
            .with_generation(9)
            .with_access(UseAccess::ReadWrite)
            .with_failure(Failure { kind: name, message: name })
            .with_site(name)
            .with_stack(StackId::LOST);
        assert_eq!(Record::from_fields(full), steps);
        let odd = Fields { alignment: Some(24), ..bare };
        assert_eq!(Record::from_fields(odd).alignment(), None);
    }

    #[test]
    fn every_number_survives_its_vocabulary() {
        for code in 0..=u8::MAX {
            let action = Action::from_code(code);
            assert_eq!(action.code(), code);
            assert_eq!(Action::from_text(&action.to_string()), Some(action));
            let path = ServedBy::from_code(code);
            assert_eq!(ServedBy::from_text(&path.to_string()), Some(path));
        }
    }
}
