//! Text charts: columns of block characters, eight steps per row.
use crate::text_report::size;

const STEPS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Returns a chart of `height` rows with sizes at the left; `line` is a limit, drawn where no column covers it.
pub fn rows(values: &[u64], top: u64, height: usize, line: Option<u64>) -> Vec<String> {
    let steps = (height * 8) as u128;
    let scaled = |value: u64| {
        let value = (u128::from(value) * steps).div_ceil(u128::from(top.max(1)));
        value.min(steps) as usize
    };
    let limit = line.map(|line| (scaled(line).max(1) - 1) / 8);
    let row = |row: usize| {
        let label = match row {
            _ if limit == Some(row) => line.map_or_else(String::new, size),
            0 => "0 bytes".to_owned(),
            _ if row + 1 == height => size(top),
            _ => String::new(),
        };
        let cells = values.iter().map(|&value| {
            let cell = scaled(value).saturating_sub(row * 8).min(8);
            match (STEPS.get(cell), limit == Some(row)) {
                (Some(' ') | None, true) => '-',
                (step, _) => step.copied().unwrap_or(' '),
            }
        });
        format!("{label:>10}  {}", cells.collect::<String>())
    };
    (0..height).rev().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_as_high_as_its_value_and_nothing_is_rounded_away() {
        let lines = rows(&[0, 1, 50, 100], 100, 2, None);
        let cells: Vec<Vec<char>> =
            lines.iter().map(|line| line.chars().skip(12).collect()).collect();
        assert_eq!(cells[0], [' ', ' ', ' ', '█']);
        assert_eq!(cells[1], [' ', '▁', '█', '█']);
        assert!(lines[0].starts_with(" 100 bytes"), "{lines:?}");
    }

    #[test]
    fn a_limit_is_drawn_where_there_is_room() {
        let lines = rows(&[0, 100, 10], 200, 4, Some(150));
        assert_eq!(lines[1].chars().skip(12).collect::<String>(), "---");
        assert!(lines[1].contains("150 bytes") && lines[0].contains("200 bytes"), "{lines:?}");
    }
}
