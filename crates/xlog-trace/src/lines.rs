//! Lines of text from a byte stream, in bounded memory. A quoted field may contain line breaks.
//!
//! A line that is too long or has an open quote is reported as broken. Only its first physical line is skipped, so one
//! stray quote does not swallow the rest of the file.

use std::io::Read;

use crate::error::TraceError;

/// The maximum length of a line, quoted line breaks included.
pub const MAX_LINE_BYTES: usize = 64 << 10;
/// The maximum number of physical lines in one record; bounds how often a byte is read again.
pub(crate) const MAX_LINES_IN_RECORD: usize = 64;
const READ_BYTES: usize = 64 << 10;

/// The reason why a line is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    TooLong,
    OpenQuote,
    /// The file ends before the line does.
    Cut,
}

/// The position of a line in the buffer.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) number: u64,
    start: usize,
    end: usize,
    /// Where the second physical line begins, if there are several.
    second: Option<usize>,
    pub(crate) broken: Option<Broken>,
    /// The first bytes of a broken line, which are no longer in the buffer.
    head: Vec<u8>,
}

#[derive(Debug)]
pub(crate) struct Lines<R> {
    inner: R,
    buffer: Vec<u8>,
    at: usize,
    read: u64,
    ended: bool,
    line: u64,
}

impl<R: Read> Lines<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self { inner, buffer: Vec::new(), at: 0, read: 0, ended: false, line: 0 }
    }

    /// Returns the line without its line break; of a broken one, only the first bytes.
    pub(crate) fn text<'a>(&'a self, line: &'a Line) -> &'a [u8] {
        if line.broken.is_some() {
            return &line.head;
        }
        self.buffer.get(line.start..line.end).unwrap_or(&[])
    }

    /// Rewinds to the second physical line of a line that could not be parsed.
    pub(crate) fn reconsider(&mut self, line: &Line) {
        if let Some(second) = line.second {
            self.at = second;
            self.line = line.number;
        }
    }

    pub(crate) fn next(&mut self) -> Result<Option<Line>, TraceError> {
        // The buffer must hold the longest line, or all that remains.
        if !self.ended && self.buffer.len() - self.at <= MAX_LINE_BYTES {
            self.fill()?;
        }
        let rest = self.buffer.get(self.at..).unwrap_or(&[]);
        if rest.is_empty() {
            return Ok(None);
        }
        let start = self.at;
        let number = self.line + 1;
        let (mut quoted, mut second, mut lines) = (false, None, 1);
        for (index, &byte) in rest.iter().enumerate().take(MAX_LINE_BYTES) {
            match byte {
                b'"' => quoted = !quoted,
                b'\n' if quoted => {
                    second = second.or(Some(start + index + 1));
                    lines += 1;
                    if lines > MAX_LINES_IN_RECORD {
                        break;
                    }
                }
                b'\n' => {
                    let end = if rest[..index].ends_with(b"\r") { index - 1 } else { index };
                    self.at = start + index + 1;
                    self.line += lines as u64;
                    return Ok(Some(Line {
                        number,
                        start,
                        end: start + end,
                        second,
                        broken: None,
                        head: Vec::new(),
                    }));
                }
                _ => {}
            }
        }
        let broken = if quoted {
            Broken::OpenQuote
        } else if rest.len() < MAX_LINE_BYTES {
            Broken::Cut
        } else {
            Broken::TooLong
        };
        self.line += 1;
        let head = rest.get(..64).unwrap_or(rest).to_vec();
        match second {
            Some(second) => self.at = second,
            None => self.pass_line()?,
        }
        Ok(Some(Line { number, start: 0, end: 0, second: None, broken: Some(broken), head }))
    }

    /// Skips the rest of the physical line, whatever its length.
    fn pass_line(&mut self) -> Result<(), TraceError> {
        loop {
            let rest = self.buffer.get(self.at..).unwrap_or(&[]);
            if let Some(index) = rest.iter().position(|&byte| byte == b'\n') {
                self.at += index + 1;
                return Ok(());
            }
            self.at = self.buffer.len();
            if self.ended {
                return Ok(());
            }
            self.fill()?;
        }
    }

    fn fill(&mut self) -> Result<(), TraceError> {
        self.buffer.drain(..self.at);
        self.at = 0;
        let want = MAX_LINE_BYTES + READ_BYTES;
        while self.buffer.len() < want && !self.ended {
            let room = (want - self.buffer.len()) as u64;
            let read = (&mut self.inner)
                .take(room)
                .read_to_end(&mut self.buffer)
                .map_err(TraceError::io(format!("reading at byte {}", self.read)))?;
            self.read += read as u64;
            self.ended = read == 0;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &[u8]) -> Vec<(u64, String, Option<Broken>)> {
        let mut lines = Lines::new(text);
        let mut out = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            let text = String::from_utf8_lossy(lines.text(&line)).into_owned();
            out.push((line.number, text, line.broken));
        }
        out
    }

    #[test]
    fn breaks_in_quotes_stay_and_an_open_quote_costs_one_line() {
        assert_eq!(
            all(b"a,\"b\nc\",d\r\ne\n"),
            [(1, "a,\"b\nc\",d".into(), None), (3, "e".into(), None)]
        );
        let open = all(b"a,\"b\nc\nd\n");
        assert_eq!(open[0].2, Some(Broken::OpenQuote));
        assert_eq!(open[1..], [(2, "c".into(), None), (3, "d".into(), None)]);
    }

    #[test]
    fn a_long_line_is_passed_over_and_the_next_one_read() {
        let mut text = vec![b'x'; 5 * MAX_LINE_BYTES];
        text.extend_from_slice(b"\nnext\nend");
        let lines = all(&text);
        assert_eq!(lines[0].2, Some(Broken::TooLong));
        assert_eq!(lines[1], (2, "next".into(), None));
        assert_eq!(lines[2], (3, "end".into(), Some(Broken::Cut)));
    }
}
