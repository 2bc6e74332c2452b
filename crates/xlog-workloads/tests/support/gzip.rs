//! Reads logs that were compressed by gzip.

use std::path::Path;

/// The text of a log; of a file that ends in `.gz`, uncompressed.
pub(crate) fn read_log(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let text = match path.extension() {
        Some(extension) if extension == "gz" => inflate(&bytes),
        _ => bytes,
    };
    String::from_utf8(text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The contents of a gzip file with one member, as `bench/traces/record.py` writes it.
fn inflate(file: &[u8]) -> Vec<u8> {
    let (magic, flags) = (&file[..3], file[3]);
    assert_eq!((magic, flags & !8), (&[0x1f, 0x8b, 8][..], 0), "deflate without options");
    let mut begin = 10;
    if flags & 8 != 0 {
        // The name of the file, up to a zero.
        begin += 1 + file[begin..].iter().position(|byte| *byte == 0).unwrap_or(0);
    }
    let packed = &file[begin..file.len() - 8];
    let text = miniz_oxide::inflate::decompress_to_vec(packed);
    let text = text.unwrap_or_else(|error| panic!("a damaged log: {error}"));
    let bytes = u32::from_le_bytes([0, 1, 2, 3].map(|at| file[file.len() - 4 + at]));
    assert_eq!(text.len(), bytes as usize, "the log is not complete");
    text
}
