//! Explains from a program's file why it may not have been intercepted.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const ELF: &[u8] = b"\x7fELF";
const SET_ID: u32 = 0o6000;
/// An upper bound of a program's headers.
const HEAD_BYTES: u64 = 1 << 16;
/// The type of the program header that names the dynamic linker.
const INTERPRETER: u32 = 3;

/// Returns the reason, if the file shows one.
pub(super) fn why_not_intercepted(name: &OsStr) -> String {
    let Some(mut path) = find(name) else { return no_call() };
    let mut head = head_of(&path);
    if let Some(interpreter) = interpreter_of_script(&head) {
        path = interpreter;
        head = head_of(&path);
    }
    let shown = path.display();
    let mode = std::fs::metadata(&path).map_or(0, |file| file.permissions().mode());
    if mode & SET_ID != 0 {
        return format!(
            "{shown} changes its user or group (setuid), so nothing is preloaded into it"
        );
    }
    match Linking::of(&head) {
        Linking::Static => {
            format!("{shown} is statically linked, so nothing can be preloaded into it")
        }
        Linking::Other if !head.starts_with(ELF) => no_call(),
        Linking::Other => format!("{shown} is no 64-bit program of the GNU C library"),
        Linking::Dynamic => no_call(),
    }
}

fn no_call() -> String {
    "the program made no CUDA call that takes device memory".to_owned()
}

/// How a program is linked.
#[derive(PartialEq, Eq, Debug)]
enum Linking {
    Static,
    Dynamic,
    /// Another file class, or another C library.
    Other,
}

impl Linking {
    fn of(head: &[u8]) -> Self {
        let u16_at = |at: usize| Some(u16::from_le_bytes(*head.get(at..)?.first_chunk()?));
        let u32_at = |at: usize| Some(u32::from_le_bytes(*head.get(at..)?.first_chunk()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(*head.get(at..)?.first_chunk()?) as usize);
        if !head.starts_with(b"\x7fELF\x02\x01") {
            return Self::Other;
        }
        let headers = || Some((u64_at(32)?, usize::from(u16_at(54)?), usize::from(u16_at(56)?)));
        let Some((start, size, count)) = headers() else { return Self::Other };
        for number in 0..count {
            let at = start.saturating_add(size.saturating_mul(number));
            if u32_at(at) != Some(INTERPRETER) {
                continue;
            }
            let range = || Some((u64_at(at + 8)?, u64_at(at + 32)?));
            let named =
                range().and_then(|(from, length)| head.get(from..from.checked_add(length)?));
            let is_musl = named.is_some_and(|name| name.windows(4).any(|part| part == b"musl"));
            return if is_musl { Self::Other } else { Self::Dynamic };
        }
        Self::Static
    }
}

/// Finds the file of a command as a shell does.
fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name));
    }
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

fn head_of(path: &Path) -> Vec<u8> {
    let mut head = Vec::new();
    if let Ok(file) = File::open(path) {
        // A file that cannot be read shows no reason.
        let _ = file.take(HEAD_BYTES).read_to_end(&mut head);
    }
    head
}

/// Returns the interpreter of a script from its first line; `env NAME` is resolved.
fn interpreter_of_script(head: &[u8]) -> Option<PathBuf> {
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let first = OsStr::from_bytes(words.next()?);
    if Path::new(first).file_name() == Some(OsStr::new("env")) {
        // Options and variables come first.
        let is_name = |word: &&[u8]| !word.starts_with(b"-") && !word.contains(&b'=');
        return words.find(is_name).and_then(|name| find(OsStr::from_bytes(name)));
    }
    Some(PathBuf::from(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_program_is_linked_is_read_from_its_head() {
        let own = head_of(&std::env::current_exe().unwrap());
        assert_eq!(Linking::of(&own), Linking::Dynamic);
        let mut without = own.clone();
        // No program headers.
        without[56..58].fill(0);
        assert_eq!(Linking::of(&without), Linking::Static);
        let thirty_two_bits = [b"\x7fELF\x01", &own[5..]].concat();
        for damaged in [&thirty_two_bits[..], b"", b"\x7fELF\x02\x01", b"MZ"] {
            assert_eq!(Linking::of(damaged), Linking::Other);
        }
    }

    #[test]
    fn a_script_is_looked_through_to_its_interpreter() {
        let of = |text: &str| interpreter_of_script(text.as_bytes());
        assert_eq!(of("#!/bin/sh -e\necho"), Some("/bin/sh".into()));
        assert_eq!(of("#! /usr/bin/env sh\n"), find(OsStr::new("sh")));
        assert_eq!(of("echo"), None);
    }
}
