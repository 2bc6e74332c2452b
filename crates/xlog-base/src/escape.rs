//! Escapes names from logs, ledgers, paths and the command line, so that they cannot control the terminal or hide or reorder
//! text.
//!
//! Every output passes through here: text and JSON of the command line, the page's texts, and the lines that libraries write
//! to standard error. Control characters (C0, DEL, C1), format characters (bidirectional overrides, zero width, soft hyphen)
//! and line or paragraph separators become JSON escapes, so escaped JSON keeps its value.

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes all but line breaks and tabs, for text already laid out in lines.
pub fn lines(text: &str) -> Cow<'_, str> {
    escape(text, |c| c != '\n' && c != '\t' && is_unsafe(c))
}

/// Escapes line breaks and tabs too, for text that must stay on its line.
pub fn line(text: &str) -> Cow<'_, str> {
    escape(text, is_unsafe)
}

fn escape(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if !is_escaped(c) => out.push(c),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    Cow::Owned(out)
}

/// Returns whether a character could control the terminal, or hide or reorder text.
pub fn is_unsafe(c: char) -> bool {
    c.is_control() || FORMAT.iter().any(|(first, last)| (*first..=*last).contains(&c))
}

/// The characters of Unicode's category "format", and the separators of lines and paragraphs.
const FORMAT: [(char, char); 20] = [
    ('\u{ad}', '\u{ad}'),
    ('\u{600}', '\u{605}'),
    ('\u{61c}', '\u{61c}'),
    ('\u{6dd}', '\u{6dd}'),
    ('\u{70f}', '\u{70f}'),
    ('\u{890}', '\u{891}'),
    ('\u{8e2}', '\u{8e2}'),
    ('\u{180e}', '\u{180e}'),
    ('\u{200b}', '\u{200f}'),
    ('\u{2028}', '\u{202e}'),
    ('\u{2060}', '\u{206f}'),
    ('\u{feff}', '\u{feff}'),
    ('\u{fff9}', '\u{fffb}'),
    ('\u{110bd}', '\u{110bd}'),
    ('\u{110cd}', '\u{110cd}'),
    ('\u{13430}', '\u{1343f}'),
    ('\u{1bca0}', '\u{1bca3}'),
    ('\u{1d173}', '\u{1d17a}'),
    ('\u{e0001}', '\u{e0001}'),
    ('\u{e0020}', '\u{e007f}'),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_commands_or_hides_is_left() {
        let evil = "a\u{1b}[2J\r\u{7f}\u{9b}\u{202e}\u{200b}\u{ad}\u{e0041}ä\n\tz";
        let escaped = "a\\u001b[2J\\r\\u007f\\u009b\\u202e\\u200b\\u00ad\\udb40\\udc41ä";
        assert_eq!(lines(evil), format!("{escaped}\n\tz"));
        assert_eq!(line(evil), format!("{escaped}\\n\\tz"));
        assert!(matches!(line("rows of table 7, ä, 日本"), Cow::Borrowed(_)));
    }
}
