//! The execution of one operation. Bytes are moved here, outside the lock.

#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::EXECUTING;
use crate::kernel::{KernelArgs, KernelBody, KernelSlice};
use crate::memory::BackingRange;
use crate::op::{Argument, Op, OpKind};

/// Executes `op`. An error is a fault of the device.
///
/// The engine has registered the bytes that `op` touches and starts no conflicting operation until this returns. Every slice below relies
/// on that exclusion.
pub(crate) fn perform(machine: u64, op: Op) -> Result<(), String> {
    if let Some(fault) = op.fault {
        return Err(format!("{} ({})", fault, op.meta.label));
    }
    match op.kind {
        OpKind::Memset(value) => {
            for piece in &op.arguments[0].pieces {
                // SAFETY: the engine runs nothing else on these bytes.
                unsafe { piece.bytes_mut() }.fill(value);
            }
        }
        OpKind::CopyIn(source) => scatter(&op.arguments[0].pieces, &source),
        OpKind::CopyDevice => copy(&op.arguments[0].pieces, &op.arguments[1].pieces),
        OpKind::Kernel(body) => {
            return kernel(body, &op.arguments)
                .map_err(|()| format!("kernel '{}' panicked", op.meta.label));
        }
        OpKind::HostFn(work) => {
            let known = op.known.map(|known| (machine, known));
            EXECUTING.with(|slot| *slot.borrow_mut() = known);
            // A panic of a host function is caught here, as at the boundary of a real driver.
            let _ = catch_unwind(AssertUnwindSafe(work));
            EXECUTING.with(|slot| *slot.borrow_mut() = None);
        }
        _ => {}
    }
    Ok(())
}

/// Copies host bytes into pieces.
pub(crate) fn scatter(pieces: &[BackingRange], mut source: &[u8]) {
    for piece in pieces {
        let (now, later) = source.split_at(piece.len().min(source.len()));
        // SAFETY: the engine runs nothing else on these bytes.
        let target = unsafe { piece.bytes_mut() };
        target[..now.len()].copy_from_slice(now);
        source = later;
    }
}

/// Copies pieces to host bytes.
pub(crate) fn gather(pieces: &[BackingRange], mut target: &mut [u8]) {
    for piece in pieces {
        let (now, later) = target.split_at_mut(piece.len().min(target.len()));
        // SAFETY: the engine runs nothing that writes these bytes.
        let source = unsafe { piece.bytes() };
        now.copy_from_slice(&source[..now.len()]);
        target = later;
    }
}

fn copy(to: &[BackingRange], from: &[BackingRange]) {
    if let ([to], [from]) = (to, from)
        && !to.overlaps(from)
    {
        // SAFETY: the engine runs nothing else on these bytes, and the two do not overlap.
        unsafe { to.bytes_mut().copy_from_slice(from.bytes()) };
        return;
    }
    let mut bytes = vec![0; from.iter().map(BackingRange::len).sum()];
    gather(from, &mut bytes);
    scatter(to, &bytes);
}

/// Runs a kernel over its arguments. An argument in one piece that is not shared is lent directly; others are copied in and out.
fn kernel(body: KernelBody, arguments: &[Argument]) -> Result<(), ()> {
    let lent: Vec<Option<&BackingRange>> = arguments
        .iter()
        .enumerate()
        .map(|(i, argument)| match argument.pieces.as_slice() {
            [piece] if !shares(arguments, i, piece) => Some(piece),
            _ => None,
        })
        .collect();
    let mut copies: Vec<Vec<u8>> = arguments
        .iter()
        .zip(&lent)
        .map(|(argument, lent)| {
            if lent.is_some() {
                return Vec::new();
            }
            let mut bytes = vec![0; argument.bytes as usize];
            gather(&argument.pieces, &mut bytes);
            bytes
        })
        .collect();
    let slices = arguments
        .iter()
        .zip(&lent)
        .zip(&mut copies)
        .map(|((argument, lent), copy)| match (lent, argument.access.writes()) {
            // SAFETY: the engine runs nothing else on these bytes, and no other argument shares one that is written.
            (Some(piece), true) => KernelSlice::Write(unsafe { piece.bytes_mut() }),
            // SAFETY: as above; readers may share.
            (Some(piece), false) => KernelSlice::Read(unsafe { piece.bytes() }),
            (None, true) => KernelSlice::Write(copy),
            (None, false) => KernelSlice::Read(copy),
        })
        .collect();
    let outcome = catch_unwind(AssertUnwindSafe(|| body.run(&mut KernelArgs { slices })));
    for ((argument, lent), copy) in arguments.iter().zip(&lent).zip(&copies) {
        if lent.is_none() && argument.access.writes() {
            scatter(&argument.pieces, copy);
        }
    }
    outcome.map_err(|_| ())
}

/// True if another argument reaches the same bytes, through a second mapping, and one of the two writes them.
fn shares(arguments: &[Argument], index: usize, piece: &BackingRange) -> bool {
    arguments.iter().enumerate().any(|(other, argument)| {
        other != index
            && (argument.access.writes() || arguments[index].access.writes())
            && argument.pieces.iter().any(|theirs| theirs.overlaps(piece))
    })
}
