//! Enough JSON to write a report: numbers, texts, lists and objects, in the order they are added.

use std::fmt::Write;

/// An object being written.
#[derive(Debug)]
pub(super) struct Json(String);

impl Json {
    pub(super) fn object() -> Self {
        Self("{".to_owned())
    }

    /// A text as JSON has it.
    pub(super) fn quote(text: &str) -> String {
        let mut quoted = String::with_capacity(text.len() + 2);
        quoted.push('"');
        for char in text.chars() {
            match char {
                '"' => quoted.push_str("\\\""),
                '\\' => quoted.push_str("\\\\"),
                '\n' => quoted.push_str("\\n"),
                control if control < ' ' => {
                    let _ = write!(quoted, "\\u{:04x}", control as u32);
                }
                other => quoted.push(other),
            }
        }
        quoted.push('"');
        quoted
    }

    /// A field whose value is JSON already.
    pub(super) fn raw(mut self, name: &str, value: &str) -> Self {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        let _ = write!(self.0, "{}:{value}", Self::quote(name));
        self
    }

    pub(super) fn text(self, name: &str, value: &str) -> Self {
        self.raw(name, &Self::quote(value))
    }

    pub(super) fn number(self, name: &str, value: usize) -> Self {
        self.raw(name, &value.to_string())
    }

    pub(super) fn option(self, name: &str, value: Option<String>) -> Self {
        self.raw(name, value.as_deref().unwrap_or("null"))
    }

    pub(super) fn list(self, name: &str, values: impl Iterator<Item = String>) -> Self {
        let values: Vec<String> = values.collect();
        self.raw(name, &format!("[{}]", values.join(",")))
    }

    pub(super) fn end(mut self) -> String {
        self.0.push('}');
        self.0
    }
}
