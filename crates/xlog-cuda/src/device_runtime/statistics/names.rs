//! The ids of tags, streams and queries: small numbers, which index arrays of accounts.
//!
//! Id 0 is for keys beyond the table's capacity. Ids of streams and queries without live blocks are recycled; those of tags are not.

use std::collections::HashMap;
use std::hash::Hash;

use super::shard::{Ids, Key};
use crate::device_runtime::resource::{AllocTag, StreamId};

/// The capacity for tags, id 0 included. Further tags share an account.
pub(super) const MAX_TAGS: usize = 1024;
/// The capacity for streams with live blocks, id 0 included.
pub(super) const MAX_STREAMS: usize = 256;
/// The capacity for queries with live blocks, id 0 included.
pub(super) const MAX_QUERIES: usize = 1024;

/// The ids of one kind of key.
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

    /// Returns the id of `key`, a new one if it has none; `None` if the table is full.
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

    /// Returns the key of this id; `None` for 0 and for free ids.
    pub(super) fn key(&self, id: usize) -> Option<K> {
        self.keys.get(id).copied().flatten()
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Frees and returns the ids that are idle.
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

/// All ids of one resource.
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

    /// Returns the ids of `key`. Calls `make_room` once if a table is full.
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
