//! The picture as SVG, without scripts or external references.
use std::fmt::Write;

use super::{Anchor, Colour, HEIGHT, Picture, Shape, WIDTH};
use crate::html::escape;

/// Encodes the picture as a file.
pub fn write(picture: &Picture) -> Vec<u8> {
    let mut out = String::new();
    let title = escape(&picture.title);
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         role=\"img\" aria-label=\"{title}\" font-family=\"system-ui, sans-serif\" font-size=\"12\">\n<title>{title}</title>"
    );
    for shape in &picture.shapes {
        let _ = match shape {
            Shape::Box { x, y, width, height, colour } => writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{}\"/>",
                hex(*colour)
            ),
            Shape::Columns { x, spans, colour } => {
                writeln!(out, "<path fill=\"{}\" d=\"{}\"/>", hex(*colour), outline(*x, spans))
            }
            Shape::Text { x, y, anchor, text, colour } => writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{}\" fill=\"{}\">{}</text>",
                match anchor {
                    Anchor::Start => "start",
                    Anchor::Middle => "middle",
                    Anchor::End => "end",
                },
                hex(*colour),
                escape(text)
            ),
        };
    }
    out.push_str("</svg>\n");
    out.into_bytes()
}

/// Returns the path along the tops and back along the bottoms; equal neighbours become one line.
fn outline(x: usize, spans: &[(f64, f64)]) -> String {
    let mut path = String::new();
    let mut edge = |values: &mut dyn Iterator<Item = (usize, f64)>, width: usize| {
        let mut last: Option<String> = None;
        for (at, value) in values {
            let value = format!("{value:.1}");
            if last.as_ref() != Some(&value) {
                let from = at + width;
                let command = if path.is_empty() { 'M' } else { 'H' };
                let _ = match command {
                    'M' => write!(path, "M{from} {value}"),
                    _ => write!(path, "H{from}V{value}"),
                };
            }
            last = Some(value);
        }
    };
    edge(&mut spans.iter().enumerate().map(|(at, span)| (x + at, span.0)), 0);
    edge(&mut spans.iter().enumerate().rev().map(|(at, span)| (x + at, span.1)), 1);
    path.push('Z');
    path
}

fn hex([red, green, blue]: Colour) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}
