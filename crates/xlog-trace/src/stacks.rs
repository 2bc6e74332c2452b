//! Sampled call stacks: an append-only, bounded table from numbers to lists of frames.
//!
//! A frame is a name, `function (file:line)` or `function`. The innermost frame comes first. A stack that does not fit
//! becomes [`StackId::LOST`]; one deeper than [`MAX_FRAMES`] loses its outermost frames.

use std::collections::HashMap;
use std::sync::Arc;

use crate::names::NameId;

/// The maximum number of stacks in one table.
pub const MAX_STACKS: usize = 1 << 16;
/// The maximum number of frames in one stack.
pub const MAX_FRAMES: usize = 64;

/// The function name of an exported call site, of which the log has only file and line.
pub(crate) const SITE_FRAME: &str = "call site";

/// The number of a call stack in a [`Names`](crate::Names) table. Zero is never issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(u32);

impl StackId {
    /// Stands for a stack that did not fit in the bounded table.
    pub const LOST: Self = Self(u32::MAX);

    pub(crate) const fn from_raw(raw: u32) -> Option<Self> {
        if raw == 0 { None } else { Some(Self(raw)) }
    }

    pub(crate) const fn raw(self) -> u32 {
        self.0
    }
}

/// A bounded table of stacks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stacks {
    frames: Vec<Arc<[NameId]>>,
    ids: HashMap<Arc<[NameId]>, StackId>,
}

impl Stacks {
    /// Returns the number of a stack and adds it if it is new.
    pub(crate) fn intern(&mut self, frames: &[NameId]) -> StackId {
        let frames = frames.get(..MAX_FRAMES).unwrap_or(frames);
        if let Some(&id) = self.ids.get(frames) {
            return id;
        }
        if self.frames.len() >= MAX_STACKS {
            return StackId::LOST;
        }
        let frames: Arc<[NameId]> = frames.into();
        self.frames.push(Arc::clone(&frames));
        let id = StackId(self.frames.len() as u32);
        self.ids.insert(frames, id);
        id
    }

    /// Adds a stack under the next number.
    pub(crate) fn push(&mut self, frames: &Arc<[NameId]>) {
        self.frames.push(Arc::clone(frames));
    }

    pub(crate) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns the frames of a stack that this table issued.
    pub(crate) fn frames(&self, id: StackId) -> Option<&[NameId]> {
        self.frames.get((id.0 as usize).checked_sub(1)?).map(|frames| &**frames)
    }
}

/// A source line as call sites and frames spell it: `file:line`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SourceLine<'a> {
    pub(crate) file: &'a str,
    pub(crate) line: u64,
}

impl<'a> SourceLine<'a> {
    /// Parses a source line; a text without a line number is all file.
    pub(crate) fn parse(text: &'a str) -> Self {
        let split = text.rsplit_once(':').and_then(|(file, line)| Some((file, line.parse().ok()?)));
        match split {
            Some((file, line)) => Self { file, line },
            None => Self { file: text, line: 0 },
        }
    }
}

/// Splits the text of a frame into its function and, if present, its source line.
pub(crate) fn split_frame(text: &str) -> (&str, Option<SourceLine<'_>>) {
    match text.strip_suffix(')').and_then(|text| text.rsplit_once(" (")) {
        Some((function, line)) if line.contains(':') => (function, Some(SourceLine::parse(line))),
        _ => (text, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Names;

    #[test]
    fn equal_stacks_are_one_and_a_full_table_loses_new_ones() {
        let mut names = Names::new();
        let [a, b] = ["a", "b"].map(|text| names.intern(text));
        let first = names.intern_stack(&[a, b]);
        assert_eq!(first, names.intern_stack(&[a, b]));
        assert_ne!(first, names.intern_stack(&[b, a]));
        assert_eq!(names.stack(first), Some(&[a, b][..]));
        let mut stacks = Stacks::default();
        for depth in 0..MAX_STACKS as u32 {
            let frames = [NameId::from_raw(depth + 1).unwrap()];
            assert_ne!(stacks.intern(&frames), StackId::LOST);
        }
        assert_eq!(stacks.intern(&[a, b]), StackId::LOST);
        assert_eq!(names.stack(StackId::LOST), None);
    }

    #[test]
    fn a_deep_stack_keeps_its_innermost_frames() {
        let mut names = Names::new();
        let frames: Vec<NameId> =
            (0..100).map(|depth| names.intern(&format!("f{depth}"))).collect();
        let id = names.intern_stack(&frames);
        assert_eq!(names.stack(id), frames.get(..MAX_FRAMES));
    }

    #[test]
    fn frames_split_into_function_and_source_line() {
        let line = SourceLine { file: "/src/a b.rs", line: 7 };
        assert_eq!(split_frame("f<(u8, u8)> (/src/a b.rs:7)"), ("f<(u8, u8)>", Some(line)));
        let (function, line) = split_frame("main::load (src/main.rs:12)");
        assert_eq!(
            (function, line),
            ("main::load", Some(SourceLine { file: "src/main.rs", line: 12 }))
        );
        assert_eq!(split_frame("__libc_start_main"), ("__libc_start_main", None));
        assert_eq!(split_frame("f(int)"), ("f(int)", None));
        assert_eq!(SourceLine::parse("C:\\a.rs"), SourceLine { file: "C:\\a.rs", line: 0 });
    }
}
