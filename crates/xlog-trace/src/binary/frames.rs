//! Finds the next valid chunk in a byte stream and skips anything else.
//!
//! Memory is bounded by one chunk. A file of nested frames with false checksums cannot cause unbounded rereading.

use std::io::Read;

use crate::error::{BadInput, InputPosition, TraceError, excerpt};

use super::layout::{FRAME_BYTES, Frame, KIND_FAILURES, KIND_RECORDS, SYNC};

const READ_BYTES: usize = 64 << 10;
/// Payload bytes with false checksums that are searched for frames; beyond them, whole payloads are skipped.
const SEARCH_LIMIT: u64 = 64 << 20;

/// The content of a log at the reader's position.
#[derive(Debug)]
pub(super) enum Found {
    /// A valid chunk; its payload is in [`Frames::payload`].
    Chunk(Frame),
    /// A chunk truncated by the end of the file; the available part of its payload is in [`Frames::payload`].
    Cut(Frame, BadInput),
    /// Bytes that are not a chunk were skipped.
    Damage(BadInput),
    /// The file ends.
    End,
}

#[derive(Debug)]
pub(super) struct Frames<R> {
    inner: R,
    buffer: Vec<u8>,
    at: usize,
    /// Offset in the file of the first byte of `buffer`.
    base: u64,
    ended: bool,
    searched: u64,
    skipped: u64,
    payload: (usize, usize),
}

impl<R: Read> Frames<R> {
    pub(super) fn new(inner: R) -> Self {
        Self {
            inner,
            buffer: Vec::new(),
            at: 0,
            base: 0,
            ended: false,
            searched: 0,
            skipped: 0,
            payload: (0, 0),
        }
    }

    pub(super) fn offset(&self) -> u64 {
        self.base + self.at as u64
    }

    /// Returns the number of bytes skipped so far.
    pub(super) fn skipped(&self) -> u64 {
        self.skipped
    }

    pub(super) fn payload(&self) -> &[u8] {
        self.buffer.get(self.payload.0..self.payload.1).unwrap_or(&[])
    }

    /// Advances to the next chunk.
    pub(super) fn next(&mut self) -> Result<Found, TraceError> {
        self.fill(FRAME_BYTES)?;
        let rest = self.rest();
        if rest.is_empty() {
            return Ok(Found::End);
        }
        let Some(frame) = Frame::parse(rest) else {
            let begun = rest.iter().zip(&SYNC).all(|(byte, mark)| byte == mark);
            if begun && rest.len() < FRAME_BYTES {
                return self.cut(Frame::default(), self.offset());
            }
            let bad = self.bad("the start of a chunk");
            self.resync(1)?;
            return Ok(Found::Damage(bad));
        };
        let (len, place) = (frame.payload_bytes as usize, self.offset());
        self.fill(FRAME_BYTES + len + FRAME_BYTES)?;
        let rest = self.rest();
        let Some(payload) = rest.get(FRAME_BYTES..FRAME_BYTES + len) else {
            return self.cut(frame, place);
        };
        if crc32fast::hash(payload) == frame.payload_crc {
            let start = self.at + FRAME_BYTES;
            self.payload = (start, start + len);
            self.at = start + len;
            return Ok(Found::Chunk(frame));
        }
        let bad = self.bad("a chunk whose payload has the checksum in its frame");
        let follows = rest.get(FRAME_BYTES + len..).unwrap_or(&[]);
        let placed = follows.is_empty() || Frame::parse(follows).is_some();
        self.searched += len as u64;
        if placed || self.searched > SEARCH_LIMIT + 4 * place {
            self.skip(FRAME_BYTES + len);
        } else {
            self.resync(SYNC.len())?;
        }
        Ok(Found::Damage(bad))
    }

    /// Handles a frame that extends past the end of the file. Either the file is truncated here, or bytes are missing
    /// before a later chunk.
    fn cut(&mut self, frame: Frame, place: u64) -> Result<Found, TraceError> {
        let bad = BadInput {
            position: InputPosition::Byte(place),
            expected: format!(
                "at least {} bytes of chunk",
                FRAME_BYTES + frame.payload_bytes as usize
            ),
            found: format!("the end of the file after {} bytes", self.rest().len()),
            good_records: 0,
        };
        let inside = self.rest().get(FRAME_BYTES..).unwrap_or(&[]);
        let follows = find_sync(inside)
            .is_some_and(|at| inside.get(at..).is_some_and(|tail| Frame::parse(tail).is_some()));
        if follows {
            self.resync(SYNC.len())?;
            return Ok(Found::Damage(bad));
        }
        let end = self.buffer.len();
        self.payload = ((self.at + FRAME_BYTES).min(end), end);
        self.at = end;
        let unit = usize::from(frame.record_bytes.max(1));
        if matches!(frame.kind, KIND_RECORDS | KIND_FAILURES) {
            self.skipped += (self.payload().len() % unit) as u64;
        } else {
            self.skipped += self.payload().len() as u64;
        }
        Ok(Found::Cut(frame, bad))
    }

    /// Skips at least `least` bytes, then on to the next valid frame or the end.
    fn resync(&mut self, least: usize) -> Result<(), TraceError> {
        self.skip(least);
        loop {
            self.fill(FRAME_BYTES)?;
            let rest = self.rest();
            if rest.len() < FRAME_BYTES {
                let len = rest.len();
                self.skip(len);
                return Ok(());
            }
            match find_sync(rest) {
                Some(0) if Frame::parse(rest).is_some() => return Ok(()),
                Some(0) => self.skip(1),
                Some(at) => self.skip(at),
                // A sync mark may begin in the last bytes, so they are kept for the next iteration.
                None => {
                    let len = rest.len();
                    self.skip(len - (SYNC.len() - 1).min(len));
                }
            }
        }
    }

    fn bad(&self, expected: &str) -> BadInput {
        BadInput {
            position: InputPosition::Byte(self.offset()),
            expected: expected.to_owned(),
            found: excerpt(self.rest().get(..16).unwrap_or(self.rest())),
            good_records: 0,
        }
    }

    fn rest(&self) -> &[u8] {
        self.buffer.get(self.at..).unwrap_or(&[])
    }

    fn skip(&mut self, bytes: usize) {
        let bytes = bytes.min(self.buffer.len() - self.at);
        self.at += bytes;
        self.skipped += bytes as u64;
    }

    /// Makes `want` bytes available from the current position, or all that remain.
    fn fill(&mut self, want: usize) -> Result<(), TraceError> {
        if self.ended || self.buffer.len() - self.at >= want {
            return Ok(());
        }
        self.buffer.drain(..self.at);
        self.base += self.at as u64;
        self.at = 0;
        while self.buffer.len() < want && !self.ended {
            let len = self.buffer.len();
            let room = (want - len).max(READ_BYTES) as u64;
            let read = (&mut self.inner)
                .take(room)
                .read_to_end(&mut self.buffer)
                .map_err(TraceError::io(format!("reading at byte {}", self.base + len as u64)))?;
            self.ended = read == 0;
        }
        Ok(())
    }
}

fn find_sync(bytes: &[u8]) -> Option<usize> {
    bytes.windows(SYNC.len()).position(|window| window == SYNC)
}
