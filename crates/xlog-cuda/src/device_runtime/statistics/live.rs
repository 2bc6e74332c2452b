//! Live blocks: their tags, ages and backtraces.

use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use xlog_base::{escape, size_text};

use super::core::Statistics;
use crate::device_runtime::logging::clock;
use crate::device_runtime::resource::{AllocTag, Generation, StreamId};

const TAGS_SHOWN: usize = 10;
const BLOCKS_SHOWN: usize = 5;
/// Lines of a backtrace that a report shows.
const FRAMES_SHOWN: usize = 12;

/// A block between its allocation and its free.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LiveBlock {
    /// Its address.
    pub ptr: u64,
    /// Its size.
    pub bytes: usize,
    /// Distinguishes it from other blocks at its address.
    pub generation: Generation,
    /// Its label.
    pub tag: AllocTag,
    /// The stream it was allocated on; `None` if there were too many streams to count it separately.
    pub stream: Option<StreamId>,
    /// The query it was allocated for.
    pub query_id: Option<u64>,
    /// Its age, within a few milliseconds.
    pub age: Duration,
    /// The backtrace of its allocation, if one was captured.
    pub backtrace: Option<Arc<Backtrace>>,
}

/// The live blocks of one tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TagShare {
    /// The tag.
    pub tag: AllocTag,
    /// Their number.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: usize,
    /// The age of the oldest one.
    pub oldest: Duration,
    /// The age of the youngest one.
    pub youngest: Duration,
}

/// The live blocks of a resource, by tag and age. Its text fits one screen.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LiveReport {
    /// The ordinal of the device.
    pub device_ordinal: u32,
    /// The number of live blocks.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: usize,
    /// By tag, the largest first.
    pub tags: Vec<TagShare>,
    /// Some of the oldest blocks, those with a backtrace first.
    pub oldest: Vec<LiveBlock>,
}

impl Statistics {
    /// Lists all live blocks, the oldest first, without those whose free is in progress.
    pub fn live_blocks(&self) -> Vec<LiveBlock> {
        let mut blocks = Vec::new();
        let now = clock::coarse();
        self.0.for_each_live(|generation, [ptr, bytes, _, born], key, backtrace| {
            blocks.push(LiveBlock {
                ptr,
                bytes: bytes as usize,
                generation,
                tag: key.tag,
                stream: (key.stream.0 != u32::MAX).then_some(key.stream),
                query_id: key.query,
                age: Duration::from_nanos(now.saturating_sub(born)),
                backtrace,
            });
        });
        blocks.sort_by_key(|block| (std::cmp::Reverse(block.age), block.generation));
        blocks
    }

    /// Reports the live blocks by tag and age. At the end of a program these are its leaks.
    pub fn live_report(&self) -> LiveReport {
        let mut blocks = self.live_blocks();
        let mut tags: HashMap<AllocTag, TagShare> = HashMap::new();
        for block in &blocks {
            let tag = block.tag;
            let share = tags.entry(tag).or_insert(TagShare {
                tag,
                blocks: 0,
                bytes: 0,
                oldest: block.age,
                youngest: block.age,
            });
            share.blocks += 1;
            share.bytes = share.bytes.saturating_add(block.bytes);
            share.oldest = share.oldest.max(block.age);
            share.youngest = share.youngest.min(block.age);
        }
        let mut tags: Vec<_> = tags.into_values().collect();
        tags.sort_by_key(|share| (std::cmp::Reverse(share.bytes), share.tag.0));
        let (count, bytes) = (blocks.len(), tags.iter().map(|share| share.bytes).sum());
        blocks.sort_by_key(|block| block.backtrace.is_none());
        blocks.truncate(BLOCKS_SHOWN);
        LiveReport {
            device_ordinal: self.device_ordinal(),
            blocks: count,
            bytes,
            tags,
            oldest: blocks,
        }
    }
}

impl fmt::Display for LiveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device_ordinal, blocks, bytes, tags, oldest } = self;
        if *blocks == 0 {
            return write!(f, "device {device_ordinal}: no live blocks");
        }
        writeln!(f, "device {device_ordinal}: {blocks} live blocks, {}", size_text(*bytes as u64))?;
        for share in tags.iter().take(TAGS_SHOWN) {
            let TagShare { tag, blocks, bytes, oldest, youngest } = share;
            let bytes = size_text(*bytes as u64);
            let (old, young) = (Age(*oldest), Age(*youngest));
            writeln!(
                f,
                "  {:<32} {bytes:>10} in {blocks} blocks, {young} to {old} old",
                escape::line(tag.0)
            )?;
        }
        if tags.len() > TAGS_SHOWN {
            writeln!(f, "  ... and {} more tags", tags.len() - TAGS_SHOWN)?;
        }
        write!(f, "the oldest:")?;
        let mut shows_trace = true;
        for block in oldest {
            let bytes = size_text(block.bytes as u64);
            write!(f, "\n  {:#x} {bytes} ({}), {} old", block.ptr, block.tag, Age(block.age))?;
            if let Some(stream) = block.stream {
                write!(f, ", {stream}")?;
            }
            if let Some(query) = block.query_id {
                write!(f, ", query {query}")?;
            }
            // One backtrace fits a screen; `live_blocks` has all.
            if let Some(trace) =
                block.backtrace.as_ref().filter(|_| std::mem::take(&mut shows_trace))
            {
                let words = [
                    "backtrace",
                    "device_runtime::statistics",
                    "device_runtime::logging",
                    "/rustc/",
                ];
                write_frames(f, trace, &words)?;
            }
        }
        Ok(())
    }
}

/// Writes the lines of a backtrace from the first frame outside this crate, whose frames contain one of `words`.
pub(crate) fn write_frames(
    f: &mut fmt::Formatter<'_>,
    trace: &Backtrace,
    words: &[&str],
) -> fmt::Result {
    let trace = trace.to_string();
    let is_inside =
        |line: &&str| line.starts_with("at ") || words.iter().any(|word| line.contains(word));
    let lines: Vec<&str> = trace.lines().map(str::trim).collect();
    let from = lines.iter().position(|line| !is_inside(line)).unwrap_or(0);
    lines.iter().skip(from).take(FRAMES_SHOWN).try_for_each(|line| write!(f, "\n    {line}"))
}

/// A duration for people.
struct Age(Duration);

impl fmt::Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        match seconds {
            0 => write!(f, "{} ms", self.0.as_millis()),
            1..120 => write!(f, "{seconds} s"),
            120..7200 => write!(f, "{} min", seconds / 60),
            7200..172_800 => write!(f, "{} h", seconds / 3600),
            _ => write!(f, "{} days", seconds / 86_400),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_neither_commands_the_terminal_nor_makes_a_line() {
        let tag = AllocTag("ev\u{1b}[2Jil\u{202e}\nforged: yes");
        let age = Duration::from_secs(1);
        let share = TagShare { tag, blocks: 1, bytes: 8, oldest: age, youngest: age };
        let block = LiveBlock {
            ptr: 256,
            bytes: 8,
            generation: Generation(1),
            tag,
            stream: None,
            query_id: None,
            age,
            backtrace: None,
        };
        let report = LiveReport {
            device_ordinal: 0,
            blocks: 1,
            bytes: 8,
            tags: vec![share],
            oldest: vec![block],
        };
        let text = report.to_string();
        assert_eq!(text.matches("ev\\u001b[2Jil\\u202e\\nforged: yes").count(), 2, "{text:?}");
        assert!(!text.contains(['\u{1b}', '\u{202e}']) && !text.contains("\nforged"), "{text:?}");
    }
}
