//! Writes the binary layout: names before their first use, then runs of records as chunks.

use crate::encoder::Encoder;
use crate::header::Header;
use crate::names::{MAX_NAMES, NameId, Names};
use crate::record::{HAS_STREAM, Record};
use crate::stacks::{MAX_STACKS, StackId};

use super::layout::{
    BYTE_ORDER, FAILURE_BYTES, Frame, KIND_FAILURES, KIND_HEADER, KIND_NAMES, KIND_RECORDS,
    KIND_STACKS, KIND_TALLY, NAME_STREAM, NAME_TEXT, ORIGIN_BYTES, RECORD_BYTES, VERSION,
    encode_record,
};

/// A run of records is sealed at this size.
const RUN_BYTES: usize = 64 << 10;

/// The fields that the records of one chunk share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct ChunkKey {
    kind: u16,
    process: u32,
    device: u32,
}

impl ChunkKey {
    /// Returns the key of a chunk that belongs to the whole file.
    const fn of_file(kind: u16) -> Self {
        Self { kind, process: 0, device: 0 }
    }
}

#[derive(Debug, Default)]
pub(crate) struct BinaryEncoder {
    /// Names that the current run needs; their chunk precedes it.
    names: Vec<u8>,
    name_count: u32,
    /// Stacks that the current run needs; their chunk follows the names and precedes the run.
    stacks: Vec<u8>,
    stack_count: u32,
    run: Vec<u8>,
    run_count: u32,
    run_key: ChunkKey,
    /// Whether records carry call site and stack: from the first record with either, until the end of the file.
    has_origins: bool,
    /// One bit for each name number written to this file.
    defined: Vec<u64>,
    streams: Vec<u32>,
    /// One bit for each stack number written to this file.
    defined_stacks: Vec<u64>,
}

impl BinaryEncoder {
    #[inline]
    fn define(&mut self, id: Option<NameId>, names: &Names) {
        let Some(id) = id.filter(|&id| id != NameId::LOST) else { return };
        let index = id.raw() as usize;
        let (word, bit) = (index / 64, 1u64 << (index % 64));
        if self.defined.get(word).is_some_and(|known| known & bit != 0) {
            return;
        }
        self.define_new(id, names, word, bit);
    }

    #[cold]
    fn define_new(&mut self, id: NameId, names: &Names, word: usize, bit: u64) {
        let Some(text) = names.text(id).filter(|_| id.raw() as usize <= MAX_NAMES) else { return };
        if self.defined.len() <= word {
            self.defined.resize(word + 1, 0);
        }
        if let Some(known) = self.defined.get_mut(word) {
            *known |= bit;
        }
        self.put_name(NAME_TEXT, id.raw(), text);
    }

    fn put_name(&mut self, space: u8, id: u32, text: &str) {
        self.names.push(space);
        self.names.extend_from_slice(&id.to_le_bytes());
        self.names.extend_from_slice(&(text.len() as u16).to_le_bytes());
        self.names.extend_from_slice(text.as_bytes());
        self.name_count += 1;
    }

    fn define_stack(&mut self, id: Option<StackId>, names: &Names) {
        let Some(id) = id.filter(|id| id.raw() as usize <= MAX_STACKS) else { return };
        let index = id.raw() as usize;
        let (word, bit) = (index / 64, 1u64 << (index % 64));
        if self.defined_stacks.get(word).is_some_and(|known| known & bit != 0) {
            return;
        }
        let Some(frames) = names.stack(id) else { return };
        if self.defined_stacks.len() <= word {
            self.defined_stacks.resize(word + 1, 0);
        }
        if let Some(known) = self.defined_stacks.get_mut(word) {
            *known |= bit;
        }
        self.stacks.extend_from_slice(&id.raw().to_le_bytes());
        self.stacks.extend_from_slice(&(frames.len() as u16).to_le_bytes());
        for frame in frames {
            self.define(Some(*frame), names);
            self.stacks.extend_from_slice(&frame.raw().to_le_bytes());
        }
        self.stack_count += 1;
    }

    /// Returns whether the current chunk has reached the size at which it is sealed.
    fn is_full(&self) -> bool {
        [&self.run, &self.names, &self.stacks].iter().any(|part| part.len() >= RUN_BYTES)
    }

    fn define_stream(&mut self, stream: u32, names: &Names) {
        let Some(name) = names.stream_name(stream) else { return };
        if let Err(place) = self.streams.binary_search(&stream) {
            self.streams.insert(place, stream);
            self.put_name(NAME_STREAM, stream, name);
        }
    }
}

impl Encoder for BinaryEncoder {
    fn begin(&mut self, header: &Header, out: &mut Vec<u8>) {
        self.names.clear();
        self.run.clear();
        self.stacks.clear();
        (self.name_count, self.stack_count, self.run_count) = (0, 0, 0);
        self.has_origins = false;
        self.defined.clear();
        self.defined_stacks.clear();
        self.streams.clear();
        let name = header.device_name.as_bytes();
        let name = name.get(..name.len().min(usize::from(u16::MAX))).unwrap_or(name);
        let mut payload = Vec::with_capacity(32 + name.len());
        payload.extend_from_slice(&VERSION.to_le_bytes());
        payload.extend_from_slice(&BYTE_ORDER.to_le_bytes());
        payload.extend_from_slice(&header.process.to_le_bytes());
        payload.extend_from_slice(&header.epoch_unix_nanos.to_le_bytes());
        payload.extend_from_slice(&(name.len() as u16).to_le_bytes());
        payload.extend_from_slice(name);
        let key = ChunkKey { kind: KIND_HEADER, process: header.process, device: 0 };
        put_chunk(key, 0, 1, &payload, out);
    }

    fn record(&mut self, record: &Record, names: &Names, out: &mut Vec<u8>) -> bool {
        let failed = record.error_kind != 0 || record.error_message != 0;
        let kind = if failed { KIND_FAILURES } else { KIND_RECORDS };
        let key = ChunkKey { kind, process: record.process, device: record.device };
        let begins_origins = !self.has_origins && (record.site != 0 || record.stack != 0);
        if key != self.run_key || begins_origins || self.is_full() {
            self.seal(out);
            self.run_key = key;
            self.has_origins |= begins_origins;
        }
        self.define(record.tag(), names);
        if record.flags & HAS_STREAM != 0 {
            self.define_stream(record.stream, names);
        }
        encode_record(record, &mut self.run);
        if failed {
            self.define(NameId::from_raw(record.error_kind), names);
            self.define(NameId::from_raw(record.error_message), names);
            self.run.extend_from_slice(&record.error_kind.to_le_bytes());
            self.run.extend_from_slice(&record.error_message.to_le_bytes());
        }
        if self.has_origins {
            self.define(record.site(), names);
            self.define_stack(record.stack(), names);
            self.run.extend_from_slice(&record.site.to_le_bytes());
            self.run.extend_from_slice(&record.stack.to_le_bytes());
        }
        self.run_count += 1;
        true
    }

    fn seal(&mut self, out: &mut Vec<u8>) {
        if self.name_count > 0 {
            put_chunk(ChunkKey::of_file(KIND_NAMES), 0, self.name_count, &self.names, out);
            self.names.clear();
            self.name_count = 0;
        }
        if self.stack_count > 0 {
            put_chunk(ChunkKey::of_file(KIND_STACKS), 0, self.stack_count, &self.stacks, out);
            self.stacks.clear();
            self.stack_count = 0;
        }
        if self.run_count > 0 {
            let origins = if self.has_origins { ORIGIN_BYTES } else { 0 };
            let fixed =
                if self.run_key.kind == KIND_FAILURES { FAILURE_BYTES } else { RECORD_BYTES };
            let size = fixed + origins;
            put_chunk(self.run_key, size as u16, self.run_count, &self.run, out);
            self.run.clear();
            self.run_count = 0;
        }
    }

    fn has_end(&self) -> bool {
        true
    }

    fn end(&mut self, written: u64, dropped: u64, out: &mut Vec<u8>) {
        self.seal(out);
        let mut payload = [0u8; 16];
        payload[..8].copy_from_slice(&written.to_le_bytes());
        payload[8..].copy_from_slice(&dropped.to_le_bytes());
        put_chunk(ChunkKey::of_file(KIND_TALLY), 0, 1, &payload, out);
    }
}

fn put_chunk(key: ChunkKey, record_bytes: u16, count: u32, payload: &[u8], out: &mut Vec<u8>) {
    let ChunkKey { kind, process, device } = key;
    let frame = Frame {
        kind,
        record_bytes,
        payload_bytes: payload.len() as u32,
        process,
        device,
        count,
        payload_crc: crc32fast::hash(payload),
    };
    frame.append_to(out);
    out.extend_from_slice(payload);
}
