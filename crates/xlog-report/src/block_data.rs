//! The kept blocks as arrays for the page: one element per block, by time of allocation.
//!
//! Texts are in one table and arrays hold their indices; index 0 is the empty text. Stacks are in one table of indices of
//! their frames. Addresses are not stored: the page derives them from a block's offset within the address map.
use std::collections::HashMap;

use serde_json::{Value, json};
use xlog_trace::{Names, StackId};

use crate::analysis::Analysis;
use crate::blocks::{Block, Caller};
use crate::html::Blob;
use crate::scan::stream_name;

/// Stands for "never" among times.
const NEVER: u64 = u64::MAX;

/// A table of unique texts.
struct Texts {
    all: Vec<String>,
    places: HashMap<String, u32>,
}

impl Texts {
    fn place(&mut self, text: String) -> u32 {
        let next = self.all.len() as u32;
        *self.places.entry(text).or_insert_with_key(|text| {
            self.all.push(text.clone());
            next
        })
    }
}

/// The frames of the stacks, concatenated as indices of texts. The first stack has none.
struct Frames {
    texts: Vec<u32>,
    /// Index of the first frame of each stack, and the number of all frames.
    first: Vec<u32>,
    places: HashMap<StackId, u32>,
}

impl Frames {
    fn place(&mut self, stack: Option<StackId>, names: &Names, texts: &mut Texts) -> u32 {
        let Some(stack) = stack else { return 0 };
        if let Some(&place) = self.places.get(&stack) {
            return place;
        }
        let place = self.first.len() as u32 - 1;
        self.places.insert(stack, place);
        let frames = names.stack_texts(Some(stack)).map(|text| texts.place(text.to_owned()));
        self.texts.extend(frames);
        self.first.push(self.texts.len() as u32);
        place
    }
}

pub(crate) fn block_data(analysis: &Analysis, blob: &mut Blob) -> Value {
    let kept = &analysis.blocks.kept;
    let names = &analysis.names;
    let mut texts = Texts { all: Vec::new(), places: HashMap::new() };
    texts.place(String::new());
    let mut column = |text: &dyn Fn(&Block) -> Option<String>| -> Vec<u32> {
        kept.iter().map(|block| texts.place(text(block).unwrap_or_default())).collect()
    };
    let stream_of = |by: &Caller| by.stream.map(|id| stream_name(Some(id), names));
    // Logs imported from other tools lack threads.
    let thread_of = |by: &Caller| (by.thread != 0).then(|| by.thread.to_string());
    let tag = column(&|block| Some(names.text_or_empty(block.life.name).to_owned()));
    let stream = column(&|block| block.life.stream.map(|id| stream_name(Some(id), names)));
    let thread = column(&|block| block.calls.allocated.as_ref().and_then(thread_of));
    let query = column(&|block| block.calls.allocated?.query.map(|query| query.to_string()));
    let site = column(&|block| Some(names.text_or_empty(block.calls.site).to_owned()));
    let served_by = column(&|block| {
        let path = xlog_trace::ServedBy::from_code(block.calls.served_by);
        (block.calls.served_by != 0).then(|| path.to_string())
    });
    let freed_stream = column(&|block| block.calls.freed.as_ref().and_then(stream_of));
    let freed_thread = column(&|block| block.calls.freed.as_ref().and_then(thread_of));
    let mut frames = Frames { texts: Vec::new(), first: vec![0, 0], places: HashMap::new() };
    let stack: Vec<u32> =
        kept.iter().map(|block| frames.place(block.calls.stack, names, &mut texts)).collect();
    let uses: Vec<_> = kept.iter().flat_map(|block| &block.calls.first_uses).collect();
    let use_stream: Vec<u32> =
        uses.iter().map(|used| texts.place(stream_of(&used.by).unwrap_or_default())).collect();
    let use_thread: Vec<u32> =
        uses.iter().map(|used| texts.place(thread_of(&used.by).unwrap_or_default())).collect();
    let mut next_use = 0;
    let first_use: Vec<u32> = kept
        .iter()
        .map(|block| {
            let first = next_use;
            next_use += block.calls.first_uses.len() as u32;
            first
        })
        .chain([uses.len() as u32])
        .collect();
    let place = kept.iter().map(|block| {
        let life = &block.life;
        analysis.segments.offset(life.process, life.device, life.ptr).unwrap_or(0)
    });
    json!({
        "all": analysis.blocks.all,
        "texts": texts.all,
        "place": blob.f64(place),
        "bytes": blob.f64(kept.iter().map(|block| block.life.bytes)),
        "born": blob.f64(kept.iter().map(|block| block.life.born)),
        "died": blob.f64(kept.iter().map(|block| block.died.unwrap_or(NEVER))),
        "last_use": blob.f64(kept.iter().map(|block| block.life.last_use.unwrap_or(NEVER))),
        "series": blob.u8(kept.iter().map(|block| block.life.tag)),
        "tag": blob.u32(tag),
        "stream": blob.u32(stream),
        "thread": blob.u32(thread),
        "query": blob.u32(query),
        "site": blob.u32(site),
        "stack": blob.u32(stack),
        "stack_frames": blob.u32(frames.texts),
        "first_frame": blob.u32(frames.first),
        "served_by": blob.u32(served_by),
        "latency": blob.u32(kept.iter().map(|block| block.calls.latency_nanos)),
        "freed_stream": blob.u32(freed_stream),
        "freed_thread": blob.u32(freed_thread),
        "uses": blob.u32(kept.iter().map(|block| block.calls.uses)),
        // Uses of all blocks, concatenated; index of the first use of each block.
        "first_use": blob.u32(first_use),
        "use_time": blob.f64(uses.iter().map(|used| used.time)),
        "use_stream": blob.u32(use_stream),
        "use_thread": blob.u32(use_thread),
        "use_access": blob.u8(uses.iter().map(|used| used.access)),
    })
}
