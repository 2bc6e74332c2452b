//! The picture as PNG at twice the size: anti-aliased columns and an 8x8 font.
use font8x8::{BASIC_FONTS, LATIN_FONTS, UnicodeFonts};

use super::{Anchor, Colour, HEIGHT, PAPER, Picture, Shape, WIDTH};

/// Pixels per unit of the picture.
const SCALE: usize = 2;
/// Width of a character in units.
const ADVANCE: f64 = 8.0;
const GLYPH: usize = 8;

struct Canvas {
    width: usize,
    pixels: Vec<u8>,
}

/// Encodes the picture as a file.
pub fn write(picture: &Picture) -> Result<Vec<u8>, String> {
    let (width, height) = (WIDTH * SCALE, HEIGHT * SCALE);
    let mut canvas = Canvas { width, pixels: PAPER.repeat(width * height) };
    for shape in &picture.shapes {
        match shape {
            Shape::Box { x, y, width, height, colour } => {
                let at = |value: f64| (value * SCALE as f64).round().max(0.0) as usize;
                for column in at(*x)..at(x + width) {
                    let (top, bottom) = (at(*y) as f64, at(y + height) as f64);
                    canvas.column(column, top, bottom, *colour);
                }
            }
            Shape::Columns { x, spans, colour } => {
                for (at, (top, bottom)) in spans.iter().enumerate() {
                    for part in 0..SCALE {
                        let column = (x + at) * SCALE + part;
                        let (top, bottom) = (top * SCALE as f64, bottom * SCALE as f64);
                        canvas.column(column, top, bottom, *colour);
                    }
                }
            }
            Shape::Text { x, y, anchor, text, colour } => {
                canvas.text(*x, *y, *anchor, text, *colour);
            }
        }
    }
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    encoder
        .add_text_chunk("Title".to_owned(), latin(&picture.title))
        .and_then(|()| encoder.write_header())
        .and_then(|mut writer| writer.write_image_data(&canvas.pixels))
        .map_err(|error| format!("drawing the picture: {error}"))?;
    Ok(file)
}

/// Replaces the characters that the format cannot hold.
fn latin(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || u32::from(c) > 255 { '?' } else { c }).collect()
}

impl Canvas {
    /// Draws a column of pixels from `top` to `bottom`; partly covered pixels are blended.
    fn column(&mut self, x: usize, top: f64, bottom: f64, colour: Colour) {
        if x >= self.width || bottom <= top {
            return;
        }
        for y in top.max(0.0) as usize..bottom.ceil().max(0.0) as usize {
            let covered = bottom.min(y as f64 + 1.0) - top.max(y as f64);
            self.mix(x, y, colour, covered);
        }
    }

    fn mix(&mut self, x: usize, y: usize, colour: Colour, part: f64) {
        let at = (y * self.width + x) * 3;
        let Some(pixel) = self.pixels.get_mut(at..at + 3) else { return };
        for (old, new) in pixel.iter_mut().zip(colour) {
            *old = (f64::from(*old) * (1.0 - part) + f64::from(new) * part).round() as u8;
        }
    }

    fn text(&mut self, x: f64, y: f64, anchor: Anchor, text: &str, colour: Colour) {
        let width = text.chars().count() as f64 * ADVANCE;
        let shift = match anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => width / 2.0,
            Anchor::End => width,
        };
        // A text that is too wide starts at the edge, so that its beginning is readable.
        let left = ((x - shift).max(0.0) * SCALE as f64) as usize;
        let top = ((y - GLYPH as f64).max(0.0) * SCALE as f64) as usize;
        for (at, c) in text.chars().enumerate() {
            let Some(glyph) = glyph(c) else { continue };
            let from = left + at * ADVANCE as usize * SCALE;
            if from + GLYPH * SCALE > self.width {
                break;
            }
            for (row, bits) in glyph.iter().enumerate() {
                for column in (0..GLYPH).filter(|column| bits & (1 << column) != 0) {
                    self.dot(from + column * SCALE, top + row * SCALE, colour);
                }
            }
        }
    }

    fn dot(&mut self, x: usize, y: usize, colour: Colour) {
        for (dx, dy) in (0..SCALE * SCALE).map(|at| (at % SCALE, at / SCALE)) {
            self.mix(x + dx, y + dy, colour, 1.0);
        }
    }
}

fn glyph(c: char) -> Option<[u8; 8]> {
    BASIC_FONTS.get(c).or_else(|| LATIN_FONTS.get(c)).or_else(|| BASIC_FONTS.get('?'))
}
