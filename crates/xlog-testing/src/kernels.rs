//! Checks that a crate's PTX was built from its CUDA sources.
//!
//! `scripts/build-kernels` stamps the first line of a PTX with the hashes of its source and of the lines below. A crate with kernels lists
//! them as [`Kernel`]s and asserts three properties in its unit tests: completeness, stamps, and loadability.

use std::ffi::CStr;

/// A CUDA source and its embedded PTX.
#[derive(Clone, Copy, Debug)]
pub struct Kernel<'a> {
    /// The name of both files without the extension.
    pub name: &'a str,
    /// The embedded PTX.
    pub ptx: &'a CStr,
    /// The text of the source.
    pub source: &'a str,
}

impl Kernel<'_> {
    fn text(&self) -> &str {
        self.ptx.to_str().unwrap()
    }
}

/// 64-bit FNV-1a, as in `scripts/build-kernels`.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The reason why `ptx` is not the build of `source`.
fn mismatch(source: &str, ptx: &str) -> Option<&'static str> {
    let (first, body) = ptx.split_once('\n').unwrap_or((ptx, ""));
    let mut words = first.split(' ');
    let stamp = |text: &str| format!("fnv1a64:{:016x}", hash(text.as_bytes()));
    if (words.next(), words.next()) != (Some("//"), Some("source")) {
        return Some("has no stamp");
    }
    if words.next() != Some(&stamp(source)) {
        return Some("was built from another source");
    }
    if (words.next(), words.next()) != (Some("body"), Some(&stamp(body))) {
        return Some("was changed after it was built");
    }
    None
}

/// Fails unless every file of `folder` belongs to one of `kernels`.
///
/// # Panics
/// If a file belongs to none of them. A host with only the test binary has no folder, and the check passes.
pub fn assert_complete(folder: &str, kernels: &[Kernel<'_>]) {
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap();
        assert!(kernels.iter().any(|kernel| kernel.name == name), "{}", path.display());
    }
}

/// Fails unless each PTX has the stamp of its source and of itself.
///
/// # Panics
/// If a PTX is empty or does not match its source.
pub fn assert_stamped(kernels: &[Kernel<'_>]) {
    for kernel in kernels {
        assert!(!kernel.text().is_empty(), "{}.ptx is empty", kernel.name);
        if let Some(problem) = mismatch(kernel.source, kernel.text()) {
            panic!("kernels/{}.ptx {problem}; run scripts/build-kernels", kernel.name);
        }
    }
}

/// Fails unless CUDA 12.0, the oldest accepted driver, can load each PTX: it reads PTX up to 8.0.
///
/// # Panics
/// If a PTX is of a later version, or names none.
pub fn assert_loadable(kernels: &[Kernel<'_>]) {
    for kernel in kernels {
        let version = kernel.text().lines().find_map(|line| line.strip_prefix(".version "));
        let (major, minor) = version.unwrap().split_once('.').unwrap();
        let version: (u32, u32) = (major.parse().unwrap(), minor.parse().unwrap());
        assert!(version <= (8, 0), "{}.ptx is of PTX {version:?}", kernel.name);
    }
}

#[cfg(test)]
mod tests {
    use super::{hash, mismatch};

    #[test]
    fn a_ptx_that_does_not_belong_is_told_from_one_that_does() {
        let (source, body) = ("source", ".version 8.0\n");
        let stamped = |of: &str, with: &str| {
            let (of, with) = (hash(of.as_bytes()), hash(with.as_bytes()));
            format!("// source fnv1a64:{of:016x} body fnv1a64:{with:016x} compiler x\n{body}")
        };
        assert_eq!(mismatch(source, &stamped(source, body)), None);
        assert_eq!(mismatch(source, body), Some("has no stamp"));
        assert!(mismatch(source, &stamped("sourcf", body)).is_some());
        assert!(mismatch(source, &stamped(source, "other")).is_some());
    }
}
