//! Writing the binary layout: names before their first use, then runs of records as chunks.

use crate::encoder::Encoder;
use crate::header::Header;
use crate::names::{MAX_NAMES, NameId, Names};
use crate::record::{HAS_STREAM, Record};

use super::layout::{
    BYTE_ORDER, FAILURE_BYTES, Frame, KIND_FAILURES, KIND_HEADER, KIND_NAMES, KIND_RECORDS,
    KIND_TALLY, NAME_STREAM, NAME_TEXT, RECORD_BYTES, VERSION, encode_record,
};

/// A run of records is sealed at this size, whatever follows.
const RUN_BYTES: usize = 64 << 10;

/// The fields that the records of one chunk share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct ChunkKey {
    kind: u16,
    process: u32,
    device: u32,
}

impl ChunkKey {
    /// The key of a chunk that belongs to the whole file.
    const fn of_file(kind: u16) -> Self {
        Self { kind, process: 0, device: 0 }
    }
}

/// Encodes records in the binary layout.
#[derive(Debug, Default)]
pub(crate) struct BinaryEncoder {
    /// Entries of names that the run in progress needs; they go in front of it.
    names: Vec<u8>,
    name_count: u32,
    run: Vec<u8>,
    run_count: u32,
    run_key: ChunkKey,
    /// One bit for each name number already in this file.
    defined: Vec<u64>,
    streams: Vec<u32>,
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
        (self.name_count, self.run_count) = (0, 0);
        self.defined.clear();
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
        if key != self.run_key || self.run.len() >= RUN_BYTES || self.names.len() >= RUN_BYTES {
            self.seal(out);
            self.run_key = key;
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
        self.run_count += 1;
        true
    }

    fn seal(&mut self, out: &mut Vec<u8>) {
        if self.name_count > 0 {
            put_chunk(ChunkKey::of_file(KIND_NAMES), 0, self.name_count, &self.names, out);
            self.names.clear();
            self.name_count = 0;
        }
        if self.run_count > 0 {
            let size =
                if self.run_key.kind == KIND_FAILURES { FAILURE_BYTES } else { RECORD_BYTES };
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
