//! Memory over time by tag as a picture of fixed size, made of shapes that SVG and PNG both draw.

mod png;
mod svg;
use crate::analysis::Analysis;
use crate::text::{named, seconds, shorten};
use crate::text_report::size;
pub use png::write as png;
pub use svg::write as svg;

const WIDTH: usize = 960;
const HEIGHT: usize = 420;
const LEFT: usize = 96;
const RIGHT: usize = 24;
const TOP: usize = 48;
const PLOT_HEIGHT: usize = 260;
const PLOT_WIDTH: usize = WIDTH - LEFT - RIGHT;
/// The maximum number of names in the legend, and its columns.
const LEGEND: usize = 15;
const LEGEND_COLUMNS: usize = 4;
const LEGEND_NAME: usize = 24;

const PAPER: Colour = [255, 255, 255];
const INK: Colour = [27, 31, 36];
const QUIET: Colour = [89, 99, 110];
const RULE: Colour = [209, 217, 224];
const ALARM: Colour = [179, 38, 30];
const TAGS: [Colour; LEGEND] = [
    [38, 114, 195],
    [222, 141, 74],
    [29, 155, 78],
    [196, 37, 64],
    [130, 87, 217],
    [154, 138, 30],
    [38, 158, 160],
    [214, 76, 176],
    [99, 163, 35],
    [76, 86, 196],
    [160, 62, 36],
    [92, 190, 150],
    [164, 56, 190],
    [209, 178, 40],
    [148, 154, 160],
];

type Colour = [u8; 3];

/// Where a text is anchored.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// The shapes of a picture, in drawing order.
#[derive(Debug)]
enum Shape {
    Box {
        x: f64,
        y: f64,
        width: f64,
        height: f64,
        colour: Colour,
    },
    /// Columns one pixel wide from `x` on, each from its top to its bottom.
    Columns {
        x: usize,
        spans: Vec<(f64, f64)>,
        colour: Colour,
    },
    Text {
        x: f64,
        y: f64,
        anchor: Anchor,
        text: String,
        colour: Colour,
    },
}

/// The shapes and the title of a picture.
#[derive(Debug)]
pub struct Picture {
    title: String,
    shapes: Vec<Shape>,
}

/// Draws the picture of a log.
pub fn draw(analysis: &Analysis, budget: Option<u64>) -> Picture {
    let total = &analysis.summary.total;
    let title = format!(
        "{}: peak {} at {}",
        analysis.file,
        size(total.peak_bytes),
        seconds(analysis.peak_time)
    );
    let title = crate::escape::line(&title).into_owned();
    let mut picture = Picture { title: title.clone(), shapes: Vec::new() };
    picture.area(0.0, 0.0, WIDTH as f64, HEIGHT as f64, PAPER);
    picture.text(LEFT as f64, 28.0, Anchor::Start, &title, INK);
    let columns = analysis.timeline.columns(PLOT_WIDTH);
    let budget = budget.filter(|budget| *budget / 3 < total.peak_bytes);
    let top = total.peak_bytes.max(budget.unwrap_or(0)).max(1) as f64 * 1.05;
    let y = |bytes: f64| TOP as f64 + PLOT_HEIGHT as f64 * (1.0 - bytes / top);

    picture.size_axis(top, y);
    picture.time_axis(analysis.timeline.end);
    let mut base = vec![0_u64; PLOT_WIDTH];
    for tag in 0..analysis.tags.len() {
        let mut spans = Vec::with_capacity(PLOT_WIDTH);
        for (bin, base) in columns.iter().zip(&mut base) {
            let bytes = analysis.timeline.stack(*bin).get(tag).copied().unwrap_or(0);
            let above = base.saturating_add(bytes);
            spans.push((y(above as f64), y(*base as f64)));
            *base = above;
        }
        picture.shapes.push(Shape::Columns { x: LEFT, spans, colour: tag_colour(analysis, tag) });
    }
    if let Some(budget) = budget {
        let at = y(budget as f64);
        picture.area(LEFT as f64, at - 1.0, PLOT_WIDTH as f64, 2.0, ALARM);
        let text = format!("budget {}", size(budget));
        picture.text(LEFT as f64 + 8.0, at - 6.0, Anchor::Start, &text, ALARM);
    }
    picture.legend(analysis);
    picture
}

fn tag_colour(analysis: &Analysis, tag: usize) -> Colour {
    let others = analysis.other_tags > 0 && tag + 1 == analysis.tags.len();
    let place = if others { LEGEND - 1 } else { tag };
    TAGS.get(place).copied().unwrap_or(QUIET)
}

impl Picture {
    fn area(&mut self, x: f64, y: f64, width: f64, height: f64, colour: Colour) {
        self.shapes.push(Shape::Box { x, y, width, height, colour });
    }

    fn text(&mut self, x: f64, y: f64, anchor: Anchor, text: &str, colour: Colour) {
        self.shapes.push(Shape::Text { x, y, anchor, text: text.to_owned(), colour });
    }

    fn size_axis(&mut self, top: f64, y: impl Fn(f64) -> f64) {
        let step = (top / 6.0).log2().ceil().exp2().max(1.0);
        let mut bytes = 0.0;
        while bytes <= top {
            let at = y(bytes).round();
            self.area(LEFT as f64 - 4.0, at, PLOT_WIDTH as f64 + 4.0, 1.0, RULE);
            self.text(LEFT as f64 - 8.0, at + 4.0, Anchor::End, &size(bytes as u64), QUIET);
            bytes += step;
        }
    }

    fn time_axis(&mut self, end: u64) {
        const MARKS: u64 = 6;
        let bottom = (TOP + PLOT_HEIGHT) as f64;
        for mark in 0..=MARKS {
            let x = LEFT as f64 + PLOT_WIDTH as f64 * mark as f64 / MARKS as f64;
            self.area(x, bottom, 1.0, 4.0, RULE);
            let time = (u128::from(end) * u128::from(mark) / u128::from(MARKS)) as u64;
            let anchor = if mark == MARKS { Anchor::End } else { Anchor::Middle };
            self.text(x, bottom + 18.0, anchor, &seconds(time), QUIET);
        }
    }

    fn legend(&mut self, analysis: &Analysis) {
        for (at, tag) in analysis.tags.iter().enumerate().take(LEGEND) {
            let width = (WIDTH - LEFT - RIGHT) as f64 / LEGEND_COLUMNS as f64;
            let x = LEFT as f64 + width * (at % LEGEND_COLUMNS) as f64;
            let y = (TOP + PLOT_HEIGHT) as f64 + 42.0 + 18.0 * (at / LEGEND_COLUMNS) as f64;
            self.area(x, y - 9.0, 10.0, 10.0, tag_colour(analysis, at));
            self.text(x + 16.0, y, Anchor::Start, &shorten(named(tag), LEGEND_NAME), INK);
        }
    }
}
