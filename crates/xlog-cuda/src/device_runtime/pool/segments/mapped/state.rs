//! Which physical memory is mapped where, and the steps that change it.
//!
//! Every handle that was created is in exactly one of three places until it is destroyed: among the pieces that the pool knows,
//! among those stranded at addresses that the pool does not know (an undo could not unmap them), or loose, without an address
//! (it could not be destroyed). A sweep tries again to get rid of the last two; a step that fails half way puts them there.

use std::collections::BTreeMap;

use xlog_driver::{DriverResult, MapAccess, MemoryHandle, VirtualMemory};

use super::super::super::super::resource::ResourceResult;
use super::super::{Span, to_usize};
use super::addresses::Addresses;

/// Physical memory without an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub(super) bytes: u64,
    pub(super) memory: MemoryHandle,
}

pub(super) struct State {
    pub(super) addresses: Addresses,
    /// By address. Mapped, accessible, and the pool's.
    pub(super) pieces: BTreeMap<u64, Piece>,
    stranded: Vec<(u64, Piece)>,
    loose: Vec<Piece>,
}

impl State {
    pub(super) fn new(addresses: Addresses) -> Self {
        Self { addresses, pieces: BTreeMap::new(), stranded: Vec::new(), loose: Vec::new() }
    }

    /// The pieces that lie inside one of `idle`, in order of their addresses.
    pub(super) fn inside(&self, idle: &[Span]) -> Vec<Span> {
        let mut found: Vec<Span> = idle
            .iter()
            .flat_map(|range| {
                let pieces = self.pieces.range(range.ptr..range.end().max(range.ptr));
                let spans = pieces.map(|(&ptr, piece)| Span { ptr, bytes: piece.bytes });
                spans.filter(|span| range.contains(*span))
            })
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Maps `pieces` one after the other at free addresses, with all rights. Pieces that it could not place are given back.
    pub(super) fn place(
        &mut self,
        memory: &dyn VirtualMemory,
        pieces: Vec<Piece>,
    ) -> Result<Span, (Vec<Piece>, xlog_driver::DriverError)> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let ptr = match self.addresses.take(memory, bytes) {
            Ok(ptr) => ptr,
            Err(error) => return Err((pieces, error)),
        };
        let mut at = ptr;
        let mut outcome = Ok(());
        let mut mapped = 0;
        for piece in &pieces {
            outcome = map(memory, at, *piece);
            if outcome.is_err() {
                break;
            }
            mapped += 1;
            at += piece.bytes;
        }
        let outcome = outcome.and_then(|()| open(memory, ptr, bytes));
        let mut at = ptr;
        let mut homeless = Vec::new();
        for (index, piece) in pieces.iter().enumerate() {
            if outcome.is_ok() {
                self.pieces.insert(at, *piece);
            } else if index < mapped && unmap(memory, at, *piece).is_err() {
                self.stranded.push((at, *piece));
            } else {
                self.addresses.give(at, piece.bytes);
                homeless.push(*piece);
            }
            at += piece.bytes;
        }
        outcome.map(|()| Span { ptr, bytes }).map_err(|error| (homeless, error))
    }

    /// Takes a piece from its address, which stays taken.
    ///
    /// The pool has promised that the host has seen all work on it complete.
    pub(super) fn lift(&mut self, memory: &dyn VirtualMemory, span: Span) -> DriverResult<Piece> {
        let found = self.pieces.get(&span.ptr).copied().filter(|piece| piece.bytes == span.bytes);
        let Some(piece) = found else {
            let value = format!("the range of {} bytes at {:#x}", span.bytes, span.ptr);
            return Err(xlog_driver::DriverError::invalid("unmap", value, "a piece that is held"));
        };
        unmap(memory, span.ptr, piece)?;
        self.pieces.remove(&span.ptr);
        Ok(piece)
    }

    /// Puts a piece back to where it was lifted from; false when it has no address now, or none that the pool knows.
    pub(super) fn put_back(&mut self, memory: &dyn VirtualMemory, ptr: u64, piece: Piece) -> bool {
        if map(memory, ptr, piece).is_err() {
            self.addresses.give(ptr, piece.bytes);
            self.loose.push(piece);
            return false;
        }
        if open(memory, ptr, piece.bytes).is_err() {
            self.stranded.push((ptr, piece));
            return false;
        }
        self.pieces.insert(ptr, piece);
        true
    }

    /// Gives pieces without address back to the device; answers how many bytes that were.
    pub(super) fn destroy(
        &mut self,
        memory: &dyn VirtualMemory,
        pieces: impl IntoIterator<Item = Piece>,
    ) -> (u64, ResourceResult<()>) {
        let (mut freed, mut outcome) = (0, Ok(()));
        for piece in pieces {
            #[allow(unsafe_code)]
            // SAFETY: the segments own the handle, and keep it only where this fails.
            let destroyed = unsafe { memory.destroy(piece.memory) };
            match destroyed {
                Ok(()) => freed += piece.bytes,
                Err(error) => {
                    self.loose.push(piece);
                    outcome = outcome.and(Err(error.into()));
                }
            }
        }
        (freed, outcome)
    }

    /// Gives back what an earlier failure left behind; answers how many bytes that were.
    pub(super) fn sweep(&mut self, memory: &dyn VirtualMemory) -> (u64, ResourceResult<()>) {
        let mut outcome = Ok(());
        for (ptr, piece) in std::mem::take(&mut self.stranded) {
            match unmap(memory, ptr, piece) {
                Ok(()) => {
                    self.addresses.give(ptr, piece.bytes);
                    self.loose.push(piece);
                }
                Err(error) => {
                    self.stranded.push((ptr, piece));
                    outcome = outcome.and(Err(error.into()));
                }
            }
        }
        let loose = std::mem::take(&mut self.loose);
        let (freed, destroyed) = self.destroy(memory, loose);
        (freed, outcome.and(destroyed))
    }

    #[cfg(test)]
    pub(super) fn hidden_bytes(&self) -> u64 {
        let stranded: u64 = self.stranded.iter().map(|(_, piece)| piece.bytes).sum();
        stranded + self.loose.iter().map(|piece| piece.bytes).sum::<u64>()
    }
}

fn map(memory: &dyn VirtualMemory, ptr: u64, piece: Piece) -> DriverResult<()> {
    #[allow(unsafe_code)]
    // SAFETY: the caller took these addresses from a reservation, and keeps them taken while a piece is mapped there.
    unsafe {
        memory.map(ptr, to_usize(piece.bytes), piece.memory)
    }
}

fn unmap(memory: &dyn VirtualMemory, ptr: u64, piece: Piece) -> DriverResult<()> {
    #[allow(unsafe_code)]
    // SAFETY: the state says that exactly this piece is mapped here. Either nobody was told of the address, or the pool promised
    // that nobody uses it and that the host has seen all work on it complete.
    unsafe {
        memory.unmap(ptr, to_usize(piece.bytes))
    }
}

/// Gives the device all rights on mapped pieces.
fn open(memory: &dyn VirtualMemory, ptr: u64, bytes: u64) -> DriverResult<()> {
    #[allow(unsafe_code)]
    // SAFETY: the caller has just mapped pieces that make up exactly this range; no right is taken away.
    unsafe {
        memory.set_access(ptr, to_usize(bytes), MapAccess::ReadWrite)
    }
}
