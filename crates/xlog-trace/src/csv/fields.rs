//! Fields of a CSV line: splitting, quoting, and numbers without `core::fmt`.

use std::borrow::Cow;

use crate::lines::MAX_LINES_IN_RECORD;

/// Line breaks kept in one quoted text; further ones become spaces, so a record never spans more lines than a reader
/// looks ahead.
const MAX_BREAKS: usize = MAX_LINES_IN_RECORD / 3 - 2;

/// The positions of a line's fields. It is reused between lines, so splitting allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Fields {
    /// Start, end (quotes excluded) and whether the field was quoted.
    places: Vec<(usize, usize, bool)>,
}

impl Fields {
    /// Splits a line. Returns false if a quoted field is followed by anything but a comma.
    pub(crate) fn split(&mut self, line: &[u8]) -> bool {
        self.places.clear();
        let mut at = 0;
        loop {
            if line.get(at) == Some(&b'"') {
                let start = at + 1;
                let mut end = start;
                loop {
                    match (line.get(end), line.get(end + 1)) {
                        (Some(b'"'), Some(b'"')) => end += 2,
                        (Some(b'"'), _) => break,
                        (Some(_), _) => end += 1,
                        (None, _) => return false,
                    }
                }
                self.places.push((start, end, true));
                at = end + 1;
            } else {
                let rest = line.get(at..).unwrap_or(&[]);
                let len = rest.iter().position(|&byte| byte == b',').unwrap_or(rest.len());
                self.places.push((at, at + len, false));
                at += len;
            }
            match line.get(at) {
                None => return true,
                Some(b',') => at += 1,
                Some(_) => return false,
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns the bytes of a field, without the surrounding quotes.
    pub(crate) fn raw<'a>(&self, line: &'a [u8], index: usize) -> &'a [u8] {
        self.places.get(index).and_then(|&(start, end, _)| line.get(start..end)).unwrap_or(&[])
    }

    /// Returns whether a field is present; an empty one must be quoted.
    pub(crate) fn is_present(&self, index: usize) -> bool {
        self.places.get(index).is_some_and(|&(start, end, quoted)| quoted || end > start)
    }

    /// Returns the text of a field, unquoted.
    pub(crate) fn text<'a>(&self, line: &'a [u8], index: usize) -> Cow<'a, str> {
        let text = String::from_utf8_lossy(self.raw(line, index));
        match self.places.get(index) {
            Some((_, _, true)) if text.contains("\"\"") => text.replace("\"\"", "\"").into(),
            _ => text,
        }
    }
}

/// Parses a decimal number.
pub(crate) fn decimal(bytes: &[u8]) -> Option<u64> {
    if bytes.is_empty() || bytes.len() > 20 {
        return None;
    }
    bytes.iter().try_fold(0u64, |value, byte| {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// Parses a hexadecimal number after `0x`.
pub(crate) fn hex(bytes: &[u8]) -> Option<u64> {
    let digits = bytes.strip_prefix(b"0x").or_else(|| bytes.strip_prefix(b"0X"))?;
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    digits
        .iter()
        .try_fold(0u64, |value, &byte| Some(value << 4 | u64::from(char::from(byte).to_digit(16)?)))
}

/// Appends a decimal number.
pub(crate) fn put_decimal(mut value: u64, out: &mut Vec<u8>) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// Appends `0x` and hex digits.
pub(crate) fn put_hex(value: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(b"0x");
    let mut digits = [0u8; 16];
    let count = (64 - (value | 1).leading_zeros() as usize).div_ceil(4);
    for (place, digit) in digits.iter_mut().take(count).enumerate() {
        let nibble = (value >> (4 * (count - 1 - place))) & 15;
        *digit = b"0123456789abcdef"[nibble as usize];
    }
    out.extend_from_slice(&digits[..count]);
}

/// Appends a text, quoted if necessary; an empty text becomes a pair of quotes.
pub(crate) fn put_text(text: &str, out: &mut Vec<u8>) {
    let plain = |byte: u8| !matches!(byte, b',' | b'"' | b'\n' | b'\r');
    if !text.is_empty() && text.bytes().all(plain) {
        out.extend_from_slice(text.as_bytes());
        return;
    }
    out.push(b'"');
    let mut breaks = 0;
    for byte in text.bytes() {
        match byte {
            b'"' => out.extend_from_slice(b"\"\""),
            b'\n' => {
                breaks += 1;
                out.push(if breaks <= MAX_BREAKS { byte } else { b' ' });
            }
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_their_text() {
        for value in [0, 1, 9, 10, 15, 16, 255, 256, 1 << 32, u64::MAX - 1, u64::MAX] {
            let mut out = Vec::new();
            put_decimal(value, &mut out);
            assert_eq!(String::from_utf8(out.clone()).unwrap(), value.to_string());
            assert_eq!(decimal(&out), Some(value));
            out.clear();
            put_hex(value, &mut out);
            assert_eq!(String::from_utf8(out.clone()).unwrap(), format!("{value:#x}"));
            assert_eq!(hex(&out), Some(value));
        }
        assert_eq!(decimal(b"18446744073709551616"), None);
        assert_eq!(decimal(b"-1"), None);
        assert_eq!(hex(b"12"), None);
        assert_eq!(hex(b"0x11112222333344445"), None);
    }

    #[test]
    fn texts_survive_their_quotes() {
        for text in ["", "a", "a,b", "\"", "\"\"", "a\"b\"", "x\ny", " ", "ä,ö", "\r"] {
            let mut line = b"1,".to_vec();
            put_text(text, &mut line);
            line.extend_from_slice(b",2");
            let mut fields = Fields::default();
            assert!(fields.split(&line), "{text:?}");
            assert_eq!(fields.len(), 3);
            assert_eq!(fields.text(&line, 1), text);
            assert!(fields.is_present(1));
        }
        let mut fields = Fields::default();
        assert!(!fields.split(b"\"a\"b,c"));
        assert!(!fields.split(b"\"a"));
        assert!(fields.split(b""));
        assert_eq!((fields.len(), fields.is_present(0)), (1, false));
    }
}
