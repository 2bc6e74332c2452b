//! The strings of a log: an append-only table from numbers to text, and the names of streams.
//!
//! The table is bounded in entries and bytes. A text that does not fit becomes [`NameId::LOST`]; no record is refused for it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::stacks::{StackId, Stacks};

/// The maximum number of strings in one table.
pub const MAX_NAMES: usize = 1 << 16;
/// The maximum number of text bytes in one table.
pub const MAX_NAME_TABLE_BYTES: usize = 16 << 20;
/// The maximum length of a name in bytes; a longer text is cut at a character boundary.
pub const MAX_NAME_BYTES: usize = 4096;
/// The maximum number of named streams.
pub const MAX_STREAM_NAMES: usize = 1 << 16;

/// An interned string: its number in a [`Names`] table. Zero is never issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NameId(u32);

impl NameId {
    /// Stands for a text that did not fit in the bounded table.
    pub const LOST: Self = Self(u32::MAX);

    pub(crate) const fn from_raw(raw: u32) -> Option<Self> {
        if raw == 0 { None } else { Some(Self(raw)) }
    }

    pub(crate) const fn raw(self) -> u32 {
        self.0
    }
}

/// A bounded table of strings.
///
/// ```
/// let mut names = xlog_trace::Names::new();
/// let rows = names.intern("rows");
/// assert_eq!((names.intern("rows"), names.text(rows)), (rows, Some("rows")));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Names {
    texts: Vec<Arc<str>>,
    ids: HashMap<Arc<str>, NameId>,
    bytes: usize,
    lost: u64,
    streams: BTreeMap<u32, Arc<str>>,
    stacks: Stacks,
}

impl Names {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of `text` and adds it if it is new; [`NameId::LOST`] if the table is full.
    pub fn intern(&mut self, text: &str) -> NameId {
        let text = cut(text);
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        if self.texts.len() >= MAX_NAMES || self.bytes + text.len() > MAX_NAME_TABLE_BYTES {
            self.lost += 1;
            return NameId::LOST;
        }
        let text: Arc<str> = text.into();
        self.bytes += text.len();
        self.texts.push(Arc::clone(&text));
        let id = NameId(self.texts.len() as u32);
        self.ids.insert(text, id);
        id
    }

    /// Returns the number of `text`, if the table has it.
    pub fn find(&self, text: &str) -> Option<NameId> {
        self.ids.get(cut(text)).copied()
    }

    pub(crate) fn is_half_full(&self) -> bool {
        self.texts.len() >= MAX_NAMES / 2 || self.bytes >= MAX_NAME_TABLE_BYTES / 2
    }

    /// Returns the text of a name that this table issued.
    pub fn text(&self, id: NameId) -> Option<&str> {
        if id == NameId::LOST {
            return Some("(lost)");
        }
        self.texts.get((id.0 as usize).checked_sub(1)?).map(|text| &**text)
    }

    /// Returns the text of an optional name: empty for no name, `(unknown)` for a number without text.
    pub fn text_or_empty(&self, id: Option<NameId>) -> &str {
        id.map_or("", |id| self.text(id).unwrap_or("(unknown)"))
    }

    /// Returns the number of strings.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Returns whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Returns how often a text did not fit.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Returns another tool's name for a stream, if the log has one.
    pub fn stream_name(&self, stream: u32) -> Option<&str> {
        self.streams.get(&stream).map(|name| &**name)
    }

    /// Names a stream; the first name stays. Returns false if the table of streams is full.
    pub fn name_stream(&mut self, stream: u32, name: &str) -> bool {
        if self.streams.contains_key(&stream) {
            return true;
        }
        if self.streams.len() >= MAX_STREAM_NAMES {
            return false;
        }
        self.streams.insert(stream, cut(name).into());
        true
    }

    /// Returns the number of a stack, whose frames start with the innermost; [`StackId::LOST`] if the table is full.
    pub fn intern_stack(&mut self, frames: &[NameId]) -> StackId {
        self.stacks.intern(frames)
    }

    /// Adds a stack under the next number, even if it already has another.
    pub(crate) fn push_stack(&mut self, frames: &Arc<[NameId]>) {
        self.stacks.push(frames);
    }

    pub(crate) fn stack_count(&self) -> usize {
        self.stacks.len()
    }

    /// Returns the frames of a stack that this table issued, the innermost first.
    pub fn stack(&self, id: StackId) -> Option<&[NameId]> {
        self.stacks.frames(id)
    }

    /// Returns the texts of a stack's frames, the innermost first; none for an unknown stack.
    pub fn stack_texts(&self, id: Option<StackId>) -> impl Iterator<Item = &str> {
        let frames = id.and_then(|id| self.stack(id)).unwrap_or(&[]);
        frames.iter().map(|frame| self.text_or_empty(Some(*frame)))
    }

    /// Returns the texts of a stack's frames without a copy of each, the innermost first; none for an unknown stack.
    pub(crate) fn shared_stack(&self, id: Option<StackId>) -> Vec<Arc<str>> {
        let frames = id.and_then(|id| self.stack(id)).unwrap_or(&[]);
        let text = |id: &NameId| self.texts.get((id.0 as usize).checked_sub(1)?).map(Arc::clone);
        frames
            .iter()
            .map(|id| text(id).unwrap_or_else(|| self.text_or_empty(Some(*id)).into()))
            .collect()
    }

    /// Returns the strings from number `known + 1` on, to update a copy that holds the first `known`.
    pub(crate) fn since(&self, known: usize) -> &[Arc<str>] {
        self.texts.get(known..).unwrap_or(&[])
    }
}

fn cut(text: &str) -> &str {
    if text.len() <= MAX_NAME_BYTES {
        return text;
    }
    let mut end = MAX_NAME_BYTES;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_table_loses_names_and_counts_them() {
        let mut names = Names::new();
        let first = names.intern("first");
        for index in 1..MAX_NAMES {
            assert_ne!(names.intern(&index.to_string()), NameId::LOST);
        }
        assert_eq!(names.intern("one more"), NameId::LOST);
        assert_eq!((names.len(), names.lost()), (MAX_NAMES, 1));
        assert_eq!(names.intern("first"), first);
        assert_eq!(names.text(NameId::LOST), Some("(lost)"));
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let mut names = Names::new();
        let id = names.intern(&"ä".repeat(MAX_NAME_BYTES));
        let text = names.text(id).unwrap();
        assert!(text.len() <= MAX_NAME_BYTES && text.chars().all(|c| c == 'ä'));
        let long = names.intern(&format!("x{}", "ä".repeat(MAX_NAME_BYTES)));
        assert_eq!(names.text(long).unwrap().len(), MAX_NAME_BYTES - 1);
    }
}
