//! The files of a recorder: opened, rotated, and kept readable after failed writes.
//!
//! Every `write` ends at a record. After a failed one the file is truncated to its last good end, and the next record
//! follows a new header and new names, so it is readable on its own. A deleted file is created again if its directory
//! exists. Every file is locked while it is open.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};

use xlog_base::escape;

use super::config::{OnError, RecorderConfig};
use super::lock::LockedFile;
use crate::encoder::{Encoder, Format, encoder};
use crate::error::TraceError;
use crate::header::Header;
use crate::names::Names;
use crate::record::Record;

const WRITE_BYTES: u64 = 256 << 10;
/// More than a header and the end of a file take.
const END_BYTES: u64 = 1 << 10;

/// The result of the last write.
#[derive(Debug, Default)]
pub(super) enum LastWrite {
    /// Nothing was written.
    #[default]
    None,
    Succeeded,
    Failed(io::ErrorKind, String),
}

/// One write: where it began in the file, and its records.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    at: u64,
    records: u64,
}

/// Counts since the last query.
#[derive(Debug, Default)]
pub(super) struct WriteCounts {
    pub(super) written: u64,
    pub(super) dropped: u64,
    pub(super) left_out: u64,
    pub(super) errors: u64,
    pub(super) last_write: LastWrite,
}

pub(super) struct Output {
    path: PathBuf,
    file: Option<LockedFile>,
    encoder: Box<dyn Encoder>,
    header: Header,
    buffer: Vec<u8>,
    /// Records in `buffer`.
    pending: u64,
    /// Whether the encoder has begun the current file.
    begun: bool,
    /// Whether opening the file failed in this round: it is tried once per round, not once per record.
    gave_up: bool,
    /// Good bytes in the file.
    size: u64,
    in_file: u64,
    write_bytes: u64,
    rotate_bytes: Option<u64>,
    keep_files: u32,
    /// Whether the format records how many records its writer dropped.
    says_dropped: bool,
    /// Whether a file without that number looks complete.
    looks_complete: bool,
    /// The last successful writes to this file, together at least [`END_BYTES`] long.
    last_chunks: VecDeque<Chunk>,
    on_error: OnError,
    reported: bool,
    counts: WriteCounts,
}

impl Output {
    pub(super) fn create(path: &Path, config: &RecorderConfig) -> Result<Self, TraceError> {
        let context = || TraceError::io(format!("creating {}", path.display()));
        // An absolute path stays valid when the program changes its directory.
        let path_abs = std::path::absolute(path).map_err(context())?;
        // Locked before it is truncated: another writer's file stays unchanged.
        let file = LockedFile::append(&path_abs)?;
        if file.metadata().map_err(context())?.is_file() {
            file.set_len(0).map_err(context())?;
        }
        let mut output = Self {
            file: Some(file),
            path: path_abs,
            encoder: encoder(config.format),
            header: config.header.clone(),
            buffer: Vec::new(),
            pending: 0,
            begun: false,
            gave_up: false,
            size: 0,
            in_file: 0,
            write_bytes: config.rotate_bytes.map_or(WRITE_BYTES, |size| WRITE_BYTES.min(size / 4)),
            rotate_bytes: config.rotate_bytes,
            keep_files: config.keep_files,
            says_dropped: config.format != Format::RmmCsv,
            looks_complete: config.format == Format::Csv,
            last_chunks: VecDeque::new(),
            on_error: config.on_error.clone(),
            reported: false,
            counts: WriteCounts::default(),
        };
        // The header is written before the first record, so that a log without records is valid.
        output.ensure_begun();
        output.write_out();
        Ok(output)
    }

    /// Adds a record to the next write.
    pub(super) fn record(&mut self, record: &Record, names: &Names) {
        if !self.begun && (self.gave_up || !self.ensure_begun()) {
            self.gave_up = true;
            self.counts.dropped += 1;
            return;
        }
        if self.encoder.record(record, names, &mut self.buffer) {
            self.pending += 1;
        } else {
            self.counts.left_out += 1;
        }
        if self.buffer.len() as u64 >= self.write_bytes {
            self.write_out();
        }
    }

    /// Writes the buffer, then rotates if the file is full.
    pub(super) fn write_out(&mut self) {
        self.gave_up = false;
        self.encoder.seal(&mut self.buffer);
        if self.buffer.is_empty() {
            return;
        }
        let result = match &self.file {
            Some(file) if !is_deleted(file) => (&**file).write_all(&self.buffer),
            Some(_) => Err(io::Error::new(io::ErrorKind::NotFound, "the file was deleted")),
            None => Err(io::Error::new(io::ErrorKind::NotFound, "the file is not open")),
        };
        match result {
            Ok(()) => {
                self.last_chunks.push_back(Chunk { at: self.size, records: self.pending });
                self.size += self.buffer.len() as u64;
                while self.last_chunks.get(1).is_some_and(|next| self.size - next.at >= END_BYTES) {
                    self.last_chunks.pop_front();
                }
                self.in_file += self.pending;
                self.counts.written += self.pending;
                self.counts.last_write = LastWrite::Succeeded;
            }
            Err(error) => {
                self.counts.dropped += self.pending;
                self.failed(&error);
                self.step_back();
            }
        }
        self.buffer.clear();
        self.pending = 0;
        if self.rotate_bytes.is_some_and(|limit| self.size >= limit) {
            self.rotate();
        }
    }

    /// Ends the last file. After a failed write, it begins the file once more to record how many records are missing.
    pub(super) fn end(&mut self, dropped: u64) {
        if self.begun || (dropped > 0 && self.says_dropped && self.ensure_begun()) {
            self.encoder.end(self.in_file, dropped, &mut self.buffer);
            self.rotate_bytes = None;
            self.write_out();
            if self.looks_complete {
                self.make_room_for_the_end(dropped);
            }
        }
    }

    /// On a full disk: drops the last chunks until the number of missing records fits into the file.
    fn make_room_for_the_end(&mut self, mut dropped: u64) {
        while matches!(self.counts.last_write, LastWrite::Failed(..))
            && let Some(Chunk { at, records }) = self.last_chunks.pop_back()
        {
            self.size = at;
            self.in_file -= records;
            self.counts.dropped += records;
            // A count since the last query, added with wrap-around.
            self.counts.written = self.counts.written.wrapping_sub(records);
            dropped += records;
            self.step_back();
            if self.ensure_begun() {
                self.encoder.end(self.in_file, dropped, &mut self.buffer);
                self.write_out();
            }
        }
    }

    pub(super) fn drain_counts(&mut self) -> WriteCounts {
        std::mem::take(&mut self.counts)
    }

    /// Ensures that a file is open and that the encoder has begun it.
    fn ensure_begun(&mut self) -> bool {
        if self.file.as_ref().is_none_or(|file| is_deleted(file)) {
            match self.reopen() {
                Ok((size, file)) => {
                    self.file = Some(file);
                    self.size = size;
                    self.in_file = 0;
                    self.last_chunks.clear();
                }
                Err(error) => {
                    self.failed(&error);
                    return false;
                }
            }
        }
        self.encoder.begin(&self.header, &mut self.buffer);
        self.begun = true;
        true
    }

    /// Opens the file at the path as its only writer. After a rotation or a removal it is a new file.
    fn reopen(&self) -> io::Result<(u64, LockedFile)> {
        let file = LockedFile::append(&self.path).map_err(|error| match error {
            TraceError::Io { source, .. } => source,
            in_use => io::Error::new(io::ErrorKind::WouldBlock, in_use.to_string()),
        })?;
        Ok((file.metadata()?.len(), file))
    }

    /// After a failed write: truncates what it may have left. The next record begins the file anew.
    fn step_back(&mut self) {
        self.begun = false;
        match &self.file {
            Some(file) if is_deleted(file) => self.file = None,
            // A device cannot be truncated; the reader skips a torn end.
            Some(file) => drop(file.set_len(self.size)),
            None => {}
        }
    }

    fn rotate(&mut self) {
        self.encoder.end(self.in_file, 0, &mut self.buffer);
        let closed = match &self.file {
            Some(file) => (&**file).write_all(&self.buffer),
            None => Ok(()),
        };
        if closed.is_ok() {
            self.size += self.buffer.len() as u64;
        }
        self.buffer.clear();
        self.begun = false;
        // The full file stays locked until it is renamed, or another writer would truncate it under the old name.
        if let Err(error) = closed.and_then(|()| self.shift_files()) {
            // The full file remains the current one and grows.
            self.failed(&error);
            return;
        }
        self.file = None;
        self.size = 0;
        self.in_file = 0;
        self.last_chunks.clear();
        self.ensure_begun();
    }

    /// Renames `name.1` to `name.2` and so on, and removes the last one.
    fn shift_files(&self) -> io::Result<()> {
        if self.keep_files == 0 {
            return std::fs::remove_file(&self.path);
        }
        for number in (1..self.keep_files).rev() {
            let from = numbered(&self.path, number);
            match std::fs::rename(from, numbered(&self.path, number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        std::fs::rename(&self.path, numbered(&self.path, 1))
    }

    fn failed(&mut self, error: &io::Error) {
        self.counts.errors += 1;
        let text = format!("writing {}: {error}", self.path.display());
        if !std::mem::replace(&mut self.reported, true) {
            match &self.on_error {
                OnError::Silent => {}
                // A callback that panics must not end the writer.
                OnError::Call(call) => {
                    drop(panic::catch_unwind(AssertUnwindSafe(|| call(&text))));
                }
                // A failure to print this has no channel left.
                OnError::Stderr => drop(writeln!(
                    io::stderr(),
                    "xlog-trace: {}; records are counted as dropped, this is said once",
                    escape::line(&text)
                )),
            }
        }
        self.counts.last_write = LastWrite::Failed(error.kind(), text);
    }
}

/// Tests whether a recorder could write to an existing file, which stays unchanged.
pub fn check_writable(path: &Path) -> Result<(), TraceError> {
    let context = || TraceError::io(format!("opening {}", path.display()));
    // Opening a pipe would wait for its reader.
    if !std::fs::metadata(path).map_err(context())?.is_file() {
        return Ok(());
    }
    let file = OpenOptions::new().append(true).open(path).map_err(context())?;
    LockedFile::lock(file, path).map(drop)
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(format!(".{number}"));
    name.into()
}

#[cfg(unix)]
fn is_deleted(file: &File) -> bool {
    use std::os::unix::fs::MetadataExt;
    file.metadata().is_ok_and(|metadata| metadata.nlink() == 0)
}

#[cfg(not(unix))]
fn is_deleted(_file: &File) -> bool {
    false
}
