//! The report as one page: markup, style, script and data in one file that loads nothing.
//!
//! Script and style are identical in every report, and the page's policy allows them by digest and forbids everything
//! else. So no text of a log can run or load anything. The script inserts such texts as text, never as markup; in the file
//! they are JSON in which `<`, `>` and `&` are escaped, or escaped markup.
use std::borrow::Cow;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::analysis::Analysis;
use crate::data::page_data;

const STYLE: &str = include_str!("page/style.css");
const MARKUP: &str = include_str!("page/page.html");
const SCRIPTS: [&str; 13] = [
    include_str!("page/data.js"),
    include_str!("page/format.js"),
    include_str!("page/view.js"),
    include_str!("page/reserved.js"),
    include_str!("page/memory.js"),
    include_str!("page/addresses.js"),
    include_str!("page/lanes.js"),
    include_str!("page/blocks.js"),
    include_str!("page/tables.js"),
    include_str!("page/filter.js"),
    include_str!("page/keys.js"),
    include_str!("page/address.js"),
    include_str!("page/main.js"),
];

/// Concatenated arrays of numbers, each aligned to eight bytes.
#[derive(Debug, Default)]
pub(crate) struct Blob(Vec<u8>);

/// Position and element type of an array.
#[derive(Serialize, Clone, Copy, Debug)]
pub(crate) struct Array {
    kind: &'static str,
    offset: usize,
    length: usize,
}

impl Blob {
    pub(crate) fn f64(&mut self, values: impl IntoIterator<Item = u64>) -> Array {
        self.put("f64", values.into_iter().map(|value| (value as f64).to_le_bytes()))
    }

    pub(crate) fn f32(&mut self, values: impl IntoIterator<Item = u64>) -> Array {
        self.put("f32", values.into_iter().map(|value| (value as f32).to_le_bytes()))
    }

    pub(crate) fn u32(&mut self, values: impl IntoIterator<Item = u32>) -> Array {
        self.put("u32", values.into_iter().map(u32::to_le_bytes))
    }

    pub(crate) fn u8(&mut self, values: impl IntoIterator<Item = u8>) -> Array {
        self.put("u8", values.into_iter().map(|value| [value]))
    }

    fn put<const N: usize>(
        &mut self,
        kind: &'static str,
        values: impl Iterator<Item = [u8; N]>,
    ) -> Array {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        let (offset, mut length) = (self.0.len(), 0);
        for value in values {
            self.0.extend_from_slice(&value);
            length += 1;
        }
        Array { kind, offset, length }
    }
}

/// Renders the page. `text` is shown if scripts do not run.
pub fn render(
    analysis: &Analysis,
    other: Option<&Analysis>,
    budget: Option<u64>,
    text: &str,
) -> Result<String, String> {
    let mut blob = Blob::default();
    let mut json = page_data(analysis, other, budget, &mut blob);
    escape_texts(&mut json);
    let json = json.to_string();
    let title = format!("{} - device memory", crate::escape::line(&analysis.file));
    let script = format!("(() => {{\n\"use strict\";\n{}}})();\n", SCRIPTS.concat());
    let policy = format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; base-uri 'none'; form-action 'none'",
        digest(&script),
        digest(STYLE)
    );
    let parts = [
        ("@POLICY@", policy),
        ("@TITLE@", escape(&title)),
        ("@STYLE@", STYLE.to_owned()),
        ("@TEXT@", escape(text)),
        ("@DATA@", escape_json(&json)),
        ("@BLOB@", STANDARD.encode(&blob.0)),
        ("@SCRIPT@", script),
    ];
    Ok(fill(MARKUP, &parts))
}

/// Escapes every text in a value itself: a JSON parser returns the escape sequence, not the character.
fn escape_texts(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Cow::Owned(escaped) = crate::escape::line(text) {
                *text = escaped;
            }
        }
        Value::Array(values) => values.iter_mut().for_each(escape_texts),
        Value::Object(fields) => fields.values_mut().for_each(escape_texts),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Inserts the parts into the markup in one pass: the text of a part is not searched again.
fn fill(markup: &str, parts: &[(&str, String)]) -> String {
    let mut page = String::new();
    let mut rest = markup;
    while let Some((before, after)) = rest.split_once('@') {
        page.push_str(before);
        let part = after.split_once('@').and_then(|(name, after)| {
            let part = parts.iter().find(|(mark, _)| mark.trim_matches('@') == name)?;
            Some((&part.1, after))
        });
        match part {
            Some((part, after)) => {
                page.push_str(part);
                rest = after;
            }
            None => {
                page.push('@');
                rest = after;
            }
        }
    }
    page.push_str(rest);
    page
}

/// Returns the digest by which the policy names a script or a style.
fn digest(text: &str) -> String {
    format!("sha256-{}", STANDARD.encode(Sha256::digest(text.as_bytes())))
}

/// Escapes a text for markup.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in crate::escape::lines(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Escapes JSON for a script element: these characters occur only in its texts.
fn escape_json(json: &str) -> String {
    json.replace('&', "\\u0026").replace('<', "\\u003c").replace('>', "\\u003e")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_looks_like_a_place_stays_what_it_is() {
        let parts = [("@A@", "@B@ and x@y".to_owned()), ("@B@", "b".to_owned())];
        assert_eq!(fill("1 @A@ 2 @B@ 3 @C@ a@b", &parts), "1 @B@ and x@y 2 b 3 @C@ a@b");
    }

    #[test]
    fn escaped_json_has_the_same_value() {
        let evil = "\u{1b}\u{9b}\u{202e}\u{e0041}";
        let json = serde_json::to_string(evil).unwrap();
        let escaped = crate::escape::lines(&json);
        assert!(escaped.is_ascii(), "{escaped}");
        assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), evil);
    }

    #[test]
    fn texts_of_a_log_cannot_become_markup() {
        let evil = "</script><img src=x onerror=alert(1)>&\"'\u{1}";
        for text in [escape(evil), escape_json(&serde_json::to_string(evil).unwrap())] {
            assert!(
                !text.contains('<') && !text.contains('>') && !text.contains('\u{1}'),
                "{text}"
            );
        }
        let back: String =
            serde_json::from_str(&escape_json(&serde_json::to_string(evil).unwrap())).unwrap();
        assert_eq!(back, evil);
    }

    #[test]
    fn the_page_writes_sizes_as_texts_do() {
        let near = |bits: u32| {
            let size = 1_u64 << bits;
            [size - 1, size, size + 1, size / 4 * 5, size / 100 * 133, size / 1000 * 1050]
        };
        let sizes: Vec<u64> = (0..52).flat_map(near).collect();
        let script = format!(
            "globalThis.matchMedia = () => ({{}});\n{}\nconsole.log(JSON.stringify({sizes:?}.map(formatBytes)));",
            include_str!("page/format.js")
        );
        let Ok(ran) = std::process::Command::new("node").args(["-e", &script]).output() else {
            return xlog_testing::left_out("sizes in the page", "node does not run");
        };
        let texts: Vec<String> = serde_json::from_slice(&ran.stdout).unwrap();
        assert_eq!(texts, sizes.into_iter().map(crate::text_report::size).collect::<Vec<_>>());
    }

    #[test]
    fn arrays_begin_where_a_browser_can_read_them_in_place() {
        let mut blob = Blob::default();
        let bytes = blob.u8([1, 2, 3]);
        let numbers = blob.f64([7]);
        assert_eq!((bytes.offset, numbers.offset, numbers.length), (0, 8, 1));
        assert_eq!(blob.0.len(), 16);
    }
}
