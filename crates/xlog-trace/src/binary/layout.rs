//! Sizes, offsets and numbers of the binary layout, and the frame in front of every chunk.

use crate::record::{
    HAS_BYTES, HAS_GENERATION, HAS_GRANTED, HAS_PTR, HAS_QUERY, HAS_STREAM, Record,
};

/// Version of the layout; readers refuse a higher one. Within a version, records may grow at their end and kinds of
/// chunks may be added; older readers skip both.
pub const VERSION: u16 = 1;
/// The maximum payload of one chunk in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;

/// First bytes of every chunk. They are not text, so no tag or path contains them by accident.
pub(crate) const SYNC: [u8; 8] = *b"\x89XTRACE\n";
/// Byte order mark in the header chunk.
pub(super) const BYTE_ORDER: u16 = 0x1a2b;

pub(super) const KIND_HEADER: u16 = 1;
pub(super) const KIND_NAMES: u16 = 2;
pub(super) const KIND_RECORDS: u16 = 3;
pub(super) const KIND_FAILURES: u16 = 4;
pub(super) const KIND_TALLY: u16 = 5;
pub(super) const KIND_STACKS: u16 = 6;

/// In a names chunk: a string.
pub(super) const NAME_TEXT: u8 = 0;
/// In a names chunk: the name of a stream.
pub(super) const NAME_STREAM: u8 = 1;

pub(super) const FRAME_BYTES: usize = 36;
pub(super) const RECORD_BYTES: usize = 80;
pub(super) const FAILURE_BYTES: usize = 88;
/// Bytes after a record for its call site and stack, in files that have them.
pub(super) const ORIGIN_BYTES: usize = 8;

/// The frame before the payload of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: u16,
    pub(super) record_bytes: u16,
    pub(super) payload_bytes: u32,
    pub(super) process: u32,
    pub(super) device: u32,
    pub(super) count: u32,
    pub(super) payload_crc: u32,
}

impl Frame {
    pub(super) fn append_to(self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&SYNC);
        out.extend_from_slice(&self.kind.to_le_bytes());
        out.extend_from_slice(&self.record_bytes.to_le_bytes());
        for field in [self.payload_bytes, self.process, self.device, self.count, self.payload_crc] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        let crc = crc32fast::hash(&out[start..]);
        out.extend_from_slice(&crc.to_le_bytes());
    }

    /// Parses the frame at the start of `bytes`; `None` unless sync mark, checksum and length are valid.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; FRAME_BYTES] = bytes.first_chunk()?;
        if !bytes.starts_with(&SYNC) {
            return None;
        }
        let mut fields = Fields(&bytes[8..]);
        let frame = Self {
            kind: fields.u16()?,
            record_bytes: fields.u16()?,
            payload_bytes: fields.u32()?,
            process: fields.u32()?,
            device: fields.u32()?,
            count: fields.u32()?,
            payload_crc: fields.u32()?,
        };
        let sound = fields.u32()? == crc32fast::hash(&bytes[..FRAME_BYTES - 4]);
        (sound && frame.payload_bytes as usize <= MAX_PAYLOAD_BYTES).then_some(frame)
    }
}

/// Reads little-endian numbers from the front of a slice.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// Appends the fixed part of a record.
pub(super) fn encode_record(record: &Record, out: &mut Vec<u8>) {
    let mut bytes = [0u8; RECORD_BYTES];
    let words = [
        record.order,
        record.time,
        record.thread,
        record.ptr,
        record.bytes,
        record.granted,
        record.generation,
        record.query,
    ];
    for (slot, word) in bytes.chunks_exact_mut(8).zip(words) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    let halves = [record.stream, record.tag, record.latency];
    for (slot, half) in bytes[64..76].chunks_exact_mut(4).zip(halves) {
        slot.copy_from_slice(&half.to_le_bytes());
    }
    bytes[76..].copy_from_slice(&[record.action, record.path, record.alignment, record.flags]);
    out.extend_from_slice(&bytes);
}

/// Decodes the fixed part of a record. Absent fields are zero, and the tag is still the file's number.
pub(super) fn decode_record(fields: &mut Fields<'_>, frame: &Frame) -> Option<Record> {
    let mut record = Record {
        order: fields.u64()?,
        time: fields.u64()?,
        thread: fields.u64()?,
        ptr: fields.u64()?,
        bytes: fields.u64()?,
        granted: fields.u64()?,
        generation: fields.u64()?,
        query: fields.u64()?,
        stream: fields.u32()?,
        tag: fields.u32()?,
        latency: fields.u32()?,
        device: frame.device,
        process: frame.process,
        error_kind: 0,
        error_message: 0,
        site: 0,
        stack: 0,
        action: fields.u8()?,
        path: fields.u8()?,
        alignment: fields.u8()?,
        flags: fields.u8()?,
    };
    let flags = record.flags;
    let keep = |bit: u8, value: u64| if flags & bit != 0 { value } else { 0 };
    record.ptr = keep(HAS_PTR, record.ptr);
    record.bytes = keep(HAS_BYTES, record.bytes);
    record.granted = keep(HAS_GRANTED, record.granted);
    record.generation = keep(HAS_GENERATION, record.generation);
    record.query = keep(HAS_QUERY, record.query);
    if flags & HAS_STREAM == 0 {
        record.stream = 0;
    }
    if record.alignment > 64 {
        record.alignment = 0;
    }
    Some(record)
}
