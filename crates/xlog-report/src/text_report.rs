//! Text for people: titles, aligned labels, and lines wrapped at the terminal's width, or 80 columns.
use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use xlog_base::size_text as size;

use crate::escape;

/// Columns of a text that does not go to a terminal.
const COLUMNS: usize = 80;
const LABEL: usize = 20;

static WIDTH: AtomicUsize = AtomicUsize::new(COLUMNS);

/// Formats a number of things; `one` is the singular.
pub fn count(number: u64, one: &str) -> String {
    match number {
        1 => format!("1 {one}"),
        _ => format!("{number} {one}s"),
    }
}

/// Sets the columns of all texts to those of the terminal, from 60 to 120.
pub fn set_width(columns: usize) {
    WIDTH.store(columns.clamp(60, 120), Ordering::Relaxed);
}

/// Returns the columns of a text.
pub fn width() -> usize {
    WIDTH.load(Ordering::Relaxed)
}

/// A text that grows line by line.
#[derive(Default, Debug)]
pub struct TextReport(String);

impl TextReport {
    /// Starts a section.
    pub fn title(&mut self, title: &str) {
        if !self.0.is_empty() {
            self.0.push('\n');
        }
        self.0.push_str(title);
        self.0.push('\n');
    }

    /// Adds a label and its value, wrapped at spaces with a hanging indent.
    pub fn line(&mut self, label: &str, value: &str) {
        let label = escape::line(label);
        let mut label = label.as_ref();
        for piece in wrap(&escape::lines(value), width() - LABEL - 2) {
            // Writing to a string cannot fail.
            let _ = writeln!(self.0, "  {label:<LABEL$}{piece}");
            label = "";
        }
    }

    /// Adds a row of a table: the first and last cells left-aligned, those between right-aligned.
    pub fn columns(&mut self, cells: &[&str]) {
        let mut line = String::new();
        for (index, cell) in cells.iter().map(|cell| escape::line(cell)).enumerate() {
            // Writing to a string cannot fail.
            let _ = match index {
                0 => write!(line, "  {cell:<5}"),
                _ if index + 1 == cells.len() => write!(line, "  {cell}"),
                _ => write!(line, " {cell:>10}"),
            };
        }
        self.0.push_str(line.trim_end());
        self.0.push('\n');
    }

    /// Adds an unwrapped line, such as one of a table.
    pub fn row(&mut self, text: &str) {
        let _ = writeln!(self.0, "{}", format!("  {}", escape::line(text)).trim_end());
    }

    /// Adds the verdict after an empty line and returns the text.
    pub fn close(mut self, verdict: &str) -> String {
        if !self.0.is_empty() {
            self.0.push('\n');
        }
        for line in wrap(&escape::line(verdict), width()) {
            self.0.push_str(&line);
            self.0.push('\n');
        }
        self.0
    }
}

/// Splits into lines of at most `width` characters; a longer word gets its own line.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapping_loses_no_word_and_keeps_the_width() {
        let text = "one two three four-and-a-very-long-word five";
        let lines = wrap(text, 10);
        assert_eq!(lines.join(" "), text);
        assert!(lines.iter().all(|line| line.len() <= 10 || !line.contains(' ')), "{lines:?}");
        assert_eq!(wrap("", 10), [""]);
    }
}
