//! Reads the binary layout as a stream of records. Memory is bounded by one chunk and the table of names.

use std::io::Read;

use crate::error::{BadInput, TraceError};
use crate::header::Header;
use crate::names::{MAX_NAMES, NameId};
use crate::reader::{LogState, Source, Strictness};
use crate::record::Record;
use crate::stacks::{MAX_STACKS, StackId};

use super::frames::{Found, Frames};
use super::layout::{
    BYTE_ORDER, FAILURE_BYTES, Fields, Frame, KIND_FAILURES, KIND_HEADER, KIND_NAMES, KIND_RECORDS,
    KIND_STACKS, KIND_TALLY, NAME_STREAM, NAME_TEXT, RECORD_BYTES, VERSION, decode_record,
};

/// Reads a binary log from any byte stream, with its own buffer.
#[derive(Debug)]
pub(crate) struct BinaryReader<R> {
    frames: Frames<R>,
    run: Option<(Frame, usize)>,
    log: LogState,
    /// Maps the file's name numbers to those of the names table; a new header clears it.
    numbers: Vec<u32>,
    /// Maps the file's stack numbers to those of the names table.
    stacks: Vec<u32>,
    /// For a later log in the same file: the offset of its epoch from the first log's epoch.
    shift: i64,
    strictness: Strictness,
    /// The truncation found, until a strict reader reports it.
    cut: Option<BadInput>,
    done: bool,
}

impl<R: Read> BinaryReader<R> {
    /// Creates a reader and reads the header, so that it is known before the first record.
    pub(crate) fn new(inner: R, strictness: Strictness) -> Result<Self, TraceError> {
        let mut reader = Self {
            frames: Frames::new(inner),
            run: None,
            log: LogState::default(),
            numbers: Vec::new(),
            stacks: Vec::new(),
            shift: 0,
            strictness,
            cut: None,
            done: false,
        };
        reader.step()?;
        Ok(reader)
    }

    fn next_in_chunk(&mut self) -> Option<Record> {
        let (frame, at) = self.run?;
        let size = usize::from(frame.record_bytes);
        let Some(bytes) = self.frames.payload().get(at..at + size) else {
            self.run = None;
            return None;
        };
        self.run = Some((frame, at + size));
        let mut fields = Fields(bytes);
        let mut record = decode_record(&mut fields, &frame)?;
        record.time = record.time.saturating_add_signed(self.shift);
        record.tag = self.number(record.tag);
        if frame.kind == KIND_FAILURES {
            let lost = NameId::LOST.raw();
            let (kind, message) = (fields.u32()?, fields.u32()?);
            record.error_kind = if kind == 0 { lost } else { self.number(kind) };
            record.error_message = if message == 0 { lost } else { self.number(message) };
        }
        // Files without call sites lack these fields.
        if let Some((site, stack)) = fields.u32().zip(fields.u32()) {
            record.site = self.number(site);
            record.stack = self.stack_number(stack);
        }
        Some(record)
    }

    fn number(&self, in_file: u32) -> u32 {
        if in_file == 0 {
            return 0;
        }
        match self.numbers.get(in_file as usize) {
            Some(&known) if known != 0 => known,
            _ => NameId::LOST.raw(),
        }
    }

    fn stack_number(&self, in_file: u32) -> u32 {
        if in_file == 0 {
            return 0;
        }
        match self.stacks.get(in_file as usize) {
            Some(&known) if known != 0 => known,
            _ => StackId::LOST.raw(),
        }
    }

    /// Reads the next chunk.
    fn step(&mut self) -> Result<(), TraceError> {
        let offset = self.frames.offset();
        let found = self.frames.next();
        self.log.report.skipped_bytes = self.frames.skipped();
        let found = found.inspect_err(|_| self.done = true)?;
        match found {
            Found::End => {
                self.done = true;
                self.log.report.unclosed = !self.log.report.closed;
            }
            Found::Damage(bad) => self.refuse(bad)?,
            Found::Cut(frame, bad) => {
                self.done = true;
                self.log.report.truncated = true;
                self.log.report.unclosed = true;
                if run_size(&frame).is_some() {
                    self.run = Some((frame, 0));
                }
                if self.strictness == Strictness::Strict {
                    self.cut = Some(bad);
                    // The records before the truncation come first, as with a lenient reader.
                    if self.run.is_none() {
                        self.report_cut()?;
                    }
                }
            }
            Found::Chunk(frame) => self.read_chunk(frame, offset)?,
        }
        Ok(())
    }

    fn read_chunk(&mut self, frame: Frame, offset: u64) -> Result<(), TraceError> {
        let sound = match frame.kind {
            KIND_HEADER => self.read_header()?,
            KIND_NAMES => self.read_names(),
            KIND_STACKS => self.read_stacks(),
            KIND_TALLY => {
                let mut fields = Fields(self.frames.payload());
                let tally = fields.u64().zip(fields.u64());
                if let Some((_, dropped)) = tally {
                    self.log.report.closed = true;
                    self.log.report.dropped_at_source =
                        self.log.report.dropped_at_source.saturating_add(dropped);
                }
                tally.is_some()
            }
            KIND_RECORDS | KIND_FAILURES => {
                self.run = Some((frame, 0));
                run_size(&frame)
                    .is_some_and(|size| (frame.payload_bytes as usize).is_multiple_of(size))
            }
            // A later version may add kinds of chunks: older readers skip them, and they are not damage.
            _ => true,
        };
        if sound {
            return Ok(());
        }
        self.run = None;
        self.refuse(BadInput {
            position: crate::InputPosition::Byte(offset),
            expected: format!("a well-formed chunk of kind {}", frame.kind),
            found: format!("{} bytes, records of {}", frame.payload_bytes, frame.record_bytes),
            good_records: 0,
        })
    }

    fn read_header(&mut self) -> Result<bool, TraceError> {
        let mut fields = Fields(self.frames.payload());
        let (Some(version), Some(order)) = (fields.u16(), fields.u16()) else { return Ok(false) };
        if order != BYTE_ORDER {
            return Ok(false);
        }
        if version > VERSION {
            self.done = true;
            return Err(TraceError::NewerVersion { found: version, supported: VERSION });
        }
        let (Some(process), Some(epoch), Some(len)) = (fields.u32(), fields.u64(), fields.u16())
        else {
            return Ok(false);
        };
        let Some(name) = fields.bytes(usize::from(len)) else { return Ok(false) };
        let header = Header {
            process,
            epoch_unix_nanos: epoch,
            device_name: String::from_utf8_lossy(name).into_owned(),
        };
        // When several logs are concatenated, all times count from the epoch of the first.
        if self.log.report.records == 0 {
            self.log.header = header;
        } else {
            self.shift = epoch.wrapping_sub(self.log.header.epoch_unix_nanos).cast_signed();
        }
        self.numbers.clear();
        self.stacks.clear();
        self.log.report.closed = false;
        Ok(true)
    }

    fn read_names(&mut self) -> bool {
        let mut fields = Fields(self.frames.payload());
        while !fields.0.is_empty() {
            let (Some(space), Some(id), Some(len)) = (fields.u8(), fields.u32(), fields.u16())
            else {
                return false;
            };
            let Some(text) = fields.bytes(usize::from(len)) else { return false };
            let text = String::from_utf8_lossy(text);
            let index = id as usize;
            match space {
                NAME_TEXT if (1..=MAX_NAMES).contains(&index) => {
                    if self.numbers.len() <= index {
                        self.numbers.resize(index + 1, 0);
                    }
                    let known = self.log.names.intern(&text).raw();
                    if let Some(slot) = self.numbers.get_mut(index) {
                        *slot = known;
                    }
                }
                NAME_TEXT => return false,
                NAME_STREAM => {
                    self.log.names.name_stream(id, &text);
                }
                _ => {}
            }
        }
        true
    }

    fn read_stacks(&mut self) -> bool {
        let mut fields = Fields(self.frames.payload());
        let mut stack = Vec::new();
        while !fields.0.is_empty() {
            let (Some(id), Some(len)) = (fields.u32(), fields.u16()) else { return false };
            let index = id as usize;
            if !(1..=MAX_STACKS).contains(&index) {
                return false;
            }
            stack.clear();
            for _ in 0..len {
                let Some(frame) = fields.u32() else { return false };
                stack.extend(NameId::from_raw(self.number(frame)));
            }
            if self.stacks.len() <= index {
                self.stacks.resize(index + 1, 0);
            }
            let known = self.log.names.intern_stack(&stack).raw();
            if let Some(slot) = self.stacks.get_mut(index) {
                *slot = known;
            }
        }
        true
    }

    /// Fails once, when a strict reader reaches the truncation. It is not counted in `skipped`: `truncated` reports it.
    fn report_cut(&mut self) -> Result<(), TraceError> {
        let Some(mut bad) = self.cut.take() else { return Ok(()) };
        bad.good_records = self.log.report.records;
        self.log.report.first_bad.get_or_insert_with(|| bad.clone());
        Err(TraceError::Bad(bad))
    }

    fn refuse(&mut self, mut bad: BadInput) -> Result<(), TraceError> {
        bad.good_records = self.log.report.records;
        let result = self.log.report.refuse(bad, self.strictness);
        self.done |= result.is_err();
        result
    }
}

impl<R: Read> Source for BinaryReader<R> {
    fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        loop {
            if let Some(record) = self.next_in_chunk() {
                self.log.report.records += 1;
                return Ok(Some(record));
            }
            self.report_cut()?;
            if self.done {
                return Ok(None);
            }
            self.step()?;
        }
    }

    fn state(&self) -> &LogState {
        &self.log
    }
}

/// Returns the size of one record in a run, if it is large enough for this version's fields.
fn run_size(frame: &Frame) -> Option<usize> {
    let least = if frame.kind == KIND_FAILURES { FAILURE_BYTES } else { RECORD_BYTES };
    let size = usize::from(frame.record_bytes);
    (matches!(frame.kind, KIND_RECORDS | KIND_FAILURES) && size >= least).then_some(size)
}
