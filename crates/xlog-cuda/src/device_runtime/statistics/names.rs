//! The numbers of tags, streams and queries: small, so that accounts are arrays.
//!
//! Number 0 is for what found no room. Streams and queries come and go, so numbers of those with nothing live are used again;
//! tags stay.

use std::collections::HashMap;
use std::hash::Hash;

use super::shard::{Ids, Key};
use crate::device_runtime::resource::{AllocTag, StreamId};

/// Different tags that are counted apart; further ones share an account.
pub(super) const MAX_TAGS: usize = 1024;
/// Streams with live blocks that are counted apart.
pub(super) const MAX_STREAMS: usize = 256;
/// Queries with live blocks that are counted apart.
pub(super) const MAX_QUERIES: usize = 1024;

/// The numbers of one kind of thing.
#[derive(Debug)]
pub(super) struct IdTable<K> {
    ids: HashMap<K, u16>,
    keys: Vec<Option<K>>,
    free: Vec<u16>,
    limit: usize,
}

impl<K: Copy + Eq + Hash> IdTable<K> {
    fn new(limit: usize) -> Self {
        Self { ids: HashMap::new(), keys: vec![None], free: Vec::new(), limit }
    }

    /// The number of `key`, a new one if it has none; none when all are taken.
    fn number(&mut self, key: K) -> Option<u16> {
        if let Some(&known) = self.ids.get(&key) {
            return Some(known);
        }
        let id = match self.free.pop() {
            Some(id) => id,
            None if self.keys.len() < self.limit => {
                self.keys.push(None);
                (self.keys.len() - 1) as u16
            }
            None => return None,
        };
        if let Some(slot) = self.keys.get_mut(usize::from(id)) {
            *slot = Some(key);
        }
        self.ids.insert(key, id);
        Some(id)
    }

    /// What has this number; none for 0 and for numbers that are free.
    pub(super) fn key(&self, id: usize) -> Option<K> {
        self.keys.get(id).copied().flatten()
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Frees the numbers that `is_idle`. Returns them.
    pub(super) fn recycle(&mut self, is_idle: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut gone = Vec::new();
        for (id, slot) in self.keys.iter_mut().enumerate() {
            if let Some(key) = *slot
                && is_idle(id)
            {
                *slot = None;
                self.ids.remove(&key);
                self.free.push(id as u16);
                gone.push(id);
            }
        }
        gone
    }
}

/// All numbers of one resource.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) tags: IdTable<AllocTag>,
    pub(super) streams: IdTable<StreamId>,
    pub(super) queries: IdTable<Option<u64>>,
}

impl Names {
    pub(super) fn new() -> Self {
        Self {
            tags: IdTable::new(MAX_TAGS),
            streams: IdTable::new(MAX_STREAMS),
            queries: IdTable::new(MAX_QUERIES),
        }
    }

    /// The numbers of `key`. `make_room` is called once when a table is full.
    pub(super) fn ids(&mut self, key: &Key, make_room: impl FnOnce(&mut Self)) -> Ids {
        let find = |names: &mut Self| {
            let stream = names.streams.number(key.stream);
            (stream, names.queries.number(key.query))
        };
        let tag = self.tags.number(key.tag).unwrap_or(0);
        let (mut stream, mut query) = find(self);
        if stream.is_none() || query.is_none() {
            make_room(self);
            (stream, query) = find(self);
        }
        let (stream, query) = (stream.unwrap_or(0), query.unwrap_or(0));
        Ids { tag, stream, query, is_traced: false }
    }
}
