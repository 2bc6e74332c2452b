// The address map: rows of addresses, columns of time.

const addressChart = chart("address-chart", 130, 26);
const map = { ...data.map, fullness: arrays(data.map.fullness), holders: arrays(data.map.tags) };
const mapBytes = map.segments.reduce((end, segment) => Math.max(end, segment[4] + segment[3]), 0);

view.high = Math.max(1, map.rows * map.row_bytes);

// Sets the visible range of the map, as offsets.
const setPlaces = (low, high) => {
  const whole = Math.max(1, map.rows * map.row_bytes);
  const span = Math.min(Math.max(high - low, 256, addressChart.plotHeight ?? 256), whole);
  view.low = Math.min(Math.max(low + (high - low - span) / 2, 0), whole - span);
  view.high = view.low + span;
  changed();
};

const zoomPlaces = (factor, around = (view.low + view.high) / 2) => {
  setPlaces(around - (around - view.low) * factor, around + (view.high - around) * factor);
};

const placeY = (place) => addressChart.height - addressChart.bottom - ((place - view.low) / (view.high - view.low)) * addressChart.plotHeight;
const placeOf = (y) => view.low + ((addressChart.height - addressChart.bottom - y) / addressChart.plotHeight) * (view.high - view.low);

// The whole map as an image with one pixel per cell, redrawn when the colours change.
let mapPicture = null;
const paintMap = () => {
  const columns = columnStarts.length;
  if (map.rows === 0 || columns === 0) return null;
  const picture = element("canvas");
  picture.width = columns;
  picture.height = map.rows;
  const context = picture.getContext("2d");
  const image = context.createImageData(columns, map.rows);
  const palette = data.tags.map((_, tag) => rgb(tagColour(tag)));
  for (let column = 0; column < columns; column++) {
    for (let row = 0; row < map.rows; row++) {
      const cell = column * map.rows + row;
      const full = map.fullness[cell];
      if (full === 0) continue;
      const [red, green, blue] = palette[map.holders[cell]] ?? [128, 128, 128];
      // Low addresses are at the bottom.
      const at = 4 * ((map.rows - 1 - row) * columns + column);
      image.data[at] = red;
      image.data[at + 1] = green;
      image.data[at + 2] = blue;
      image.data[at + 3] = 60 + (195 * full) / 255;
    }
  }
  context.putImageData(image, 0, 0);
  return picture;
};

// Returns red, green and blue of a CSS colour.
const rgb = (text) => {
  const context = element("canvas").getContext("2d", { willReadFrequently: true });
  context.fillStyle = text;
  context.fillRect(0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data;
};

const drawAddresses = () => {
  const self = addressChart;
  const { context } = self;
  self.begin();
  self.timeAxis();
  mapPicture ??= paintMap();
  const y = placeY;
  const [topRow, shownRows] = [map.rows - view.high / map.row_bytes, (view.high - view.low) / map.row_bytes];
  self.inside(() => {
    drawSegments(self);
    if (!mapPicture) return;
    context.imageSmoothingEnabled = false;
    // Wide cells are drawn faintly behind the exact blocks.
    const cell = Math.max(self.plotHeight / shownRows / 4, ((data.span / columnStarts.length) / (view.to - view.from)) * self.plotWidth / 4);
    context.globalAlpha = Math.min(1, Math.max(0.2, 2 / cell));
    const first = lastAt(columnStarts, view.from);
    const last = lastAt(columnStarts, view.to);
    for (let column = first; column <= last; column++) {
      // Cells are aligned to whole pixels, or overlapping ones would blend.
      const from = Math.floor(self.x(columnStarts[column]));
      const to = Math.floor(self.x(column + 1 < columnStarts.length ? columnStarts[column + 1] : data.span));
      if (to === from && column < last) continue;
      context.drawImage(mapPicture, column, topRow, 1, shownRows, from, self.top, Math.max(to - from, 1), self.plotHeight);
    }
    context.globalAlpha = 1;
    drawBlocks(self);
    context.strokeStyle = colour("quiet");
    context.lineWidth = 1;
    context.setLineDash([1, 3]);
    for (const segment of map.segments.length <= 64 ? map.segments : []) {
      const at = Math.round(y(segment[4])) + 0.5;
      context.beginPath();
      context.moveTo(self.left, at);
      context.lineTo(self.width - self.right, at);
      context.stroke();
    }
    context.setLineDash([]);
  });
  context.fillStyle = colour("quiet");
  context.textAlign = "right";
  context.textBaseline = "bottom";
  let free = self.height;
  for (const segment of map.segments) {
    const at = y(segment[4]);
    if (at > free || at < self.top || at > self.height - self.bottom + 1) continue;
    context.fillText(segment[2], self.left - 8, at);
    free = at - 16;
  }
  // Axis marks at regular offsets, where no range start is labelled.
  for (let mark = 0; mark <= 4 && map.rows > 0; mark++) {
    const place = view.low + ((view.high - view.low) * mark) / 4;
    if (view.high - view.low >= map.rows * map.row_bytes || (mark > 0 && y(place) > free + 1)) continue;
    const segment = map.segments[lastAt(stretchPlaces, place)];
    context.fillText(`0x${(BigInt(segment[2]) + BigInt(Math.max(0, Math.round(place - segment[4])))).toString(16)}`, self.left - 8, Math.max(y(place), self.top + 12));
  }
  self.cursor();
  drawAddressInstant();
};

const drawAddressInstant = () => {
  const column = lastAt(columnStarts, view.selected);
  let [taken, touched] = [0, 0];
  for (let row = 0; row < map.rows; row++) {
    const full = map.fullness[column * map.rows + row];
    taken += (full / 255) * map.row_bytes;
    if (full > 0) touched += 1;
  }
  say("address-instant", map.rows === 0
    ? "The log has no addresses."
    : `Around ${formatTime(view.selected)}: ${touched} of ${map.rows} rows have blocks, about ${formatShare(taken, mapBytes)} of ${formatBytes(mapBytes)} touched in all`);
  addressChart.canvas.setAttribute(
    "aria-label",
    `Address map: ${map.segments.length} stretches, ${formatBytes(mapBytes)}, over time`,
  );
};
