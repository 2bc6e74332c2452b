// Reserved memory: the segments that allocators held, in use or not. Hidden for logs without segments.

// Its index among the tags that can be hidden, after all of them.
const reservedTag = series;
const showsReserved = () => data.reserved !== null && !view.hidden.has(reservedTag);

// Returns the maximum reserved bytes of each column of pixels.
const visibleReserved = (columns) => {
  const level = levelFor(view.from, view.to, columns);
  const step = (view.to - view.from) / columns;
  const highest = new Float64Array(columns);
  let bin = lastAt(level.starts, view.from);
  for (let column = 0; column < columns; column++) {
    const to = view.from + (column + 1) * step;
    highest[column] = level.reserved[bin];
    while (bin + 1 < level.starts.length && level.starts[bin + 1] < to) {
      bin += 1;
      highest[column] = Math.max(highest[column], level.reserved[bin]);
    }
  }
  return highest;
};

const reservedPath = (self, held, y) => {
  const { context } = self;
  context.beginPath();
  held.forEach((bytes, column) => {
    context.lineTo(self.left + column, y(bytes));
    context.lineTo(self.left + column + 1, y(bytes));
  });
};

// Drawn behind the tags: reserved but unused memory is visible above them.
const drawReservedArea = (self, held, y) => {
  const { context } = self;
  reservedPath(self, held, y);
  context.lineTo(self.left + held.length, y(0));
  context.lineTo(self.left, y(0));
  context.fillStyle = colour("reserved");
  context.fill();
};

const drawReservedLine = (self, held, y, isAbove) => {
  const { context } = self;
  reservedPath(self, held, y);
  context.strokeStyle = colour("ink");
  context.lineWidth = 1.5;
  context.stroke();
  if (!isAbove) return;
  context.fillStyle = colour("ink");
  context.textAlign = "right";
  context.textBaseline = "top";
  context.fillText(`reserved up to ${formatBytes(held.reduce((most, bytes) => Math.max(most, bytes), 0))}, above the chart`, self.width - self.right - 6, self.top + 4);
};

const reservedAt = (time) => levels[0].reserved[lastAt(levels[0].starts, time)];

// Frames each segment in the address map from its reservation to its return; the uncovered area is free.
const drawSegments = (self) => {
  if (!showsReserved()) return;
  const { context } = self;
  for (const [, , , bytes, place, from, to] of data.reserved.ranges) {
    const end = to ?? data.span;
    if (end < view.from || from > view.to || place > view.high || place + bytes < view.low) continue;
    const [left, right] = [Math.max(self.left - 2, self.x(from)), Math.min(self.width - self.right + 2, self.x(end))];
    const [top, bottom] = [Math.max(self.top - 2, placeY(place + bytes)), Math.min(self.height - self.bottom + 2, placeY(place))];
    context.fillStyle = colour("reserved");
    context.fillRect(left, top, Math.max(right - left, 1), Math.max(bottom - top, 1));
    if (right - left < 3 || bottom - top < 3) continue;
    context.strokeStyle = colour("quiet");
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, top + 0.5, right - left - 1, bottom - top - 1);
  }
};

// Describes the segment at a time and an offset.
const describeSegment = (time, place) => {
  const found = showsReserved() && data.reserved.ranges.find(([, , , bytes, start, from, to]) =>
    place >= start && place < start + bytes && time >= from && time <= (to ?? data.span));
  if (!found) return null;
  const [process, device, address, bytes, , from, to] = found;
  return [
    `reserved and free, in a segment of ${formatBytes(bytes)}`,
    `${address}, device ${device}, process ${process}`,
    `taken at ${formatTime(from)}, ${to === null ? "held at the end" : `returned at ${formatTime(to)}`}`,
  ];
};

const makeReservedTable = () => {
  byId("reserved-more").hidden = data.reserved === null;
  if (data.reserved === null) return;
  const { ranges, all_ranges: all, peak, end } = data.reserved;
  byId("addresses-about").textContent = "Frames are segments that an allocator held; grey in them is reserved and free. Darker is fuller; the colour is the tag with the most bytes.";
  show("reserved-ranges", table(`Segments: ${formatBytes(peak)} at most, ${formatBytes(end)} at the end${more(Math.min(ranges.length, 500), all, "segments")}`, [
    { name: "Address", cell: (row) => row[2] },
    { name: "Bytes", cell: (row) => formatBytes(row[3]) },
    { name: "Device", cell: (row) => row[1] },
    { name: "Process", cell: (row) => row[0] },
    { name: "Taken", cell: (row) => formatTime(row[5]) },
    { name: "Returned", cell: (row) => (row[6] === null ? "never" : formatTime(row[6])) },
  ], ranges.slice(0, 500)));
};
