//! Address use over time as a heat map: rows of addresses, columns of time.
//!
//! A cell shows the maximum fill of its address range within its column, and the tag with the most bytes then. An
//! allocation or a free costs one step per row that its block covers, however long blocks live.
use crate::lives::Life;
use crate::segments::Segments;

/// The maximum number of rows.
pub(crate) const ROWS: usize = 256;
/// The maximum number of columns.
pub(crate) const COLUMNS: usize = 1024;

/// The heat map, column by column.
#[derive(Clone, Debug, Default)]
pub(crate) struct AddressMap {
    pub(crate) rows: usize,
    pub(crate) row_bytes: u64,
    /// 0 is empty, 255 full.
    pub(crate) fullness: Vec<u8>,
    /// The largest tag of the cell.
    pub(crate) tags: Vec<u8>,
}

#[derive(Clone, Debug)]
struct Row {
    live: u64,
    by_tag: Vec<u64>,
    /// The maximum live bytes in this column of time.
    highest: u64,
    holder: u8,
}

/// Builds a map, record by record.
#[derive(Debug)]
pub(crate) struct AddressMapBuilder<'a> {
    segments: &'a Segments,
    rows: Vec<Row>,
    made: AddressMap,
}

impl<'a> AddressMapBuilder<'a> {
    pub(crate) fn new(segments: &'a Segments, tags: usize) -> Self {
        let row_bytes = segments.bytes().div_ceil(ROWS as u64).max(1);
        let rows = segments.bytes().div_ceil(row_bytes) as usize;
        let row = Row { live: 0, by_tag: vec![0; tags], highest: 0, holder: 0 };
        Self {
            segments,
            rows: vec![row; rows],
            made: AddressMap { rows, row_bytes, ..AddressMap::default() },
        }
    }

    pub(crate) fn born(&mut self, life: &Life) {
        self.each(life, |row, bytes, row_bytes| {
            row.live = row.live.saturating_add(bytes);
            let mut most = 0;
            if let Some(own) = row.by_tag.get_mut(life.tag as usize) {
                *own = own.saturating_add(bytes);
                most = *own;
            }
            if row.live >= row.highest {
                row.highest = row.live;
                row.holder = if most > row_bytes / 2 { life.tag } else { holder(&row.by_tag) };
            }
        });
    }

    pub(crate) fn died(&mut self, life: &Life) {
        self.each(life, |row, bytes, _| {
            row.live = row.live.saturating_sub(bytes);
            if let Some(own) = row.by_tag.get_mut(life.tag as usize) {
                *own = own.saturating_sub(bytes);
            }
        });
    }

    fn each(&mut self, life: &Life, change: impl Fn(&mut Row, u64, u64)) {
        let Some(start) = self.segments.offset(life.process, life.device, life.ptr) else { return };
        let (row_bytes, end) = (self.made.row_bytes, start.saturating_add(life.extent));
        let (first, last) = ((start / row_bytes) as usize, ((end - 1) / row_bytes) as usize);
        let Some(rows) = self.rows.get_mut(first..=last.min(self.made.rows.saturating_sub(1)))
        else {
            return;
        };
        for (at, row) in rows.iter_mut().enumerate() {
            let row_start = (first + at) as u64 * row_bytes;
            let bytes = end.min(row_start.saturating_add(row_bytes)) - start.max(row_start);
            change(row, bytes, row_bytes);
        }
    }

    /// Ends a column of time; the next begins with the live blocks.
    pub(crate) fn end_column(&mut self) {
        let full = u128::from(self.made.row_bytes);
        for row in &mut self.rows {
            let part = (u128::from(row.highest) * 255).div_ceil(full).min(255);
            self.made.fullness.push(part as u8);
            self.made.tags.push(row.holder);
            row.highest = row.live;
            row.holder = holder(&row.by_tag);
        }
    }

    pub(crate) fn finish(self) -> AddressMap {
        self.made
    }
}

/// Returns the largest tag; the first of equal ones.
fn holder(by_tag: &[u64]) -> u8 {
    let most = by_tag.iter().enumerate().rev().max_by_key(|(_, bytes)| **bytes);
    most.map_or(0, |(tag, _)| tag as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segments::SegmentBuilder;

    fn life(ptr: u64, extent: u64, tag: u8) -> Life {
        Life {
            process: 0,
            device: 0,
            ptr,
            bytes: extent,
            extent,
            tag,
            name: None,
            stream: None,
            generation: None,
            order: 0,
            born: 0,
            last_use: None,
            last_stream: None,
        }
    }

    #[test]
    fn a_cell_shows_its_fullest_moment_and_whose_it_was() {
        let mib = 1 << 20;
        let mut segments = SegmentBuilder::default();
        segments.add(0, 0, 256 * mib, 256 * mib);
        let segments = segments.finish();
        let mut map = AddressMapBuilder::new(&segments, 3);
        let (whole, half) = (life(256 * mib, 2 * mib, 1), life(258 * mib, mib / 2, 2));
        map.born(&whole);
        map.born(&half);
        map.died(&whole);
        map.end_column();
        map.end_column();
        let made = map.finish();
        assert_eq!((made.rows, made.row_bytes), (256, mib));
        assert_eq!(made.fullness[..4], [255, 255, 128, 0]);
        assert_eq!(made.tags[..3], [1, 1, 2]);
        assert_eq!(made.fullness[256..260], [0, 0, 128, 0], "the second column has what is left");
    }
}
