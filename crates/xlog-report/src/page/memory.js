// Memory over time: stacked tags, the budget, failures, and the compared log as a line.

const memoryChart = chart("memory-chart", 84, 26);

// Returns the highest bin of every column of pixels.
const visibleBins = (columns) => {
  const level = levelFor(view.from, view.to, columns);
  const step = (view.to - view.from) / columns;
  const bins = new Int32Array(columns);
  let bin = lastAt(level.starts, view.from);
  for (let column = 0; column < columns; column++) {
    const to = view.from + (column + 1) * step;
    let best = bin;
    while (bin + 1 < level.starts.length && level.starts[bin + 1] < to) {
      bin += 1;
      if (level.totals[bin] > level.totals[best]) best = bin;
    }
    bins[column] = best;
  }
  return { level, bins };
};

const shownTotal = (level, bin) => {
  if (view.hidden.size === 0) return level.totals[bin];
  let total = level.totals[bin];
  for (const tag of view.hidden) if (tag !== reservedTag) total -= level.stacks[bin * series + tag];
  return Math.max(0, total);
};

const otherLog = data.other && { starts: arrays(data.other.starts), totals: arrays(data.other.totals) };

const drawMemory = () => {
  const self = memoryChart;
  const { context } = self;
  self.begin();
  const columns = Math.max(1, Math.floor(self.plotWidth));
  const { level, bins } = visibleBins(columns);
  let top = 1;
  for (const bin of bins) top = Math.max(top, shownTotal(level, bin));
  // Reserved memory and the budget are shown unless they would flatten the chart.
  const held = showsReserved() ? visibleReserved(columns) : null;
  const mostHeld = held ? held.reduce((most, bytes) => Math.max(most, bytes), 0) : 0;
  if (mostHeld < 4 * top) top = Math.max(top, mostHeld);
  if (data.budget && data.budget < 3 * top) top = Math.max(top, data.budget);
  top *= 1.05;
  self.topBytes = top;
  const y = (bytes) => self.top + self.plotHeight * (1 - bytes / top);
  sizeAxis(self, top, y);
  self.timeAxis();
  self.inside(() => {
    if (held) drawReservedArea(self, held, y);
    const base = new Float64Array(columns);
    for (let tag = 0; tag < series; tag++) {
      if (view.hidden.has(tag)) continue;
      context.beginPath();
      context.moveTo(self.left, y(base[0]));
      for (let column = 0; column < columns; column++) {
        const height = y(base[column] + level.stacks[bins[column] * series + tag]);
        context.lineTo(self.left + column, height);
        context.lineTo(self.left + column + 1, height);
      }
      for (let column = columns - 1; column >= 0; column--) {
        const height = y(base[column]);
        context.lineTo(self.left + column + 1, height);
        context.lineTo(self.left + column, height);
        base[column] += level.stacks[bins[column] * series + tag];
      }
      context.fillStyle = tagColour(tag);
      context.fill();
    }
    if (held) drawReservedLine(self, held, y, mostHeld > top);
    if (otherLog) drawOther(self, y);
    if (data.budget) drawBudget(self, y);
    drawFailures(self);
  });
  self.cursor();
};

const sizeAxis = (self, top, y) => {
  const { context } = self;
  const rough = top / Math.max(2, self.plotHeight / 50);
  const power = 2 ** Math.floor(Math.log2(rough));
  const step = power >= rough ? power : 2 * power;
  context.fillStyle = colour("quiet");
  context.strokeStyle = colour("rule");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let bytes = 0; bytes <= top; bytes += step) {
    const at = Math.round(y(bytes)) + 0.5;
    context.beginPath();
    context.moveTo(self.left - 4, at);
    context.lineTo(self.width - self.right, at);
    context.stroke();
    context.fillText(formatBytes(bytes), self.left - 8, Math.max(at, 10));
  }
};

const drawOther = (self, y) => {
  const { context } = self;
  context.strokeStyle = colour("other");
  context.lineWidth = 1.5;
  context.setLineDash([2, 2]);
  context.beginPath();
  const { starts, totals } = otherLog;
  for (let column = 0; column < self.plotWidth; column++) {
    const from = self.time(self.left + column);
    if (from > data.other.span) break;
    const [first, last] = [lastAt(starts, from), lastAt(starts, self.time(self.left + column + 1))];
    const stride = Math.max(1, Math.floor((last - first) / 64));
    let highest = 0;
    for (let bin = first; bin <= last; bin += stride) highest = Math.max(highest, totals[bin]);
    context.lineTo(self.left + column, y(highest));
  }
  context.stroke();
  context.setLineDash([]);
};

const drawBudget = (self, y) => {
  const { context } = self;
  const at = y(data.budget);
  if (at < self.top) return;
  context.strokeStyle = context.fillStyle = colour("alarm");
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(self.left, at);
  context.lineTo(self.width - self.right, at);
  context.stroke();
  context.textAlign = "left";
  context.textBaseline = "bottom";
  context.fillText(`budget ${formatBytes(data.budget)}`, self.left + 6, at - 2);
};

const drawFailures = (self) => {
  const { context } = self;
  context.fillStyle = colour("alarm");
  for (const failed of data.failed) {
    const x = self.x(failed.time);
    context.beginPath();
    context.moveTo(x, self.top + 10);
    context.lineTo(x - 5, self.top);
    context.lineTo(x + 5, self.top);
    context.fill();
  }
};

// Returns the tags at the selected instant, the largest first.
const heldAt = (bin) => {
  const rows = [];
  for (let tag = 0; tag < series; tag++) rows.push({ tag, name: tagName(data.tags[tag]), bytes: levels[0].stacks[bin * series + tag] });
  return rows.filter((row) => row.bytes > 0).sort((a, b) => b.bytes - a.bytes);
};

let shownInstant = null;
const drawInstant = () => {
  const bin = selectedBin();
  const total = levels[0].totals[bin];
  const rows = heldAt(bin);
  const top = rows.slice(0, 3).map((row) => `${row.name} ${formatBytes(row.bytes)}`).join(", ");
  const budget = data.budget ? ` (${formatShare(total, data.budget)} of the budget)` : "";
  const of = data.reserved ? ` of ${formatBytes(reservedAt(view.selected))} reserved` : "";
  say("instant", `At ${formatTime(view.selected)}: ${formatBytes(total)}${of}${budget}${top ? `; ${top}` : ""}`);
  if (shownInstant !== view.selected) {
    shownInstant = view.selected;
    show("selected", table(
      `Tags at ${formatTime(view.selected)}, ${formatBytes(total)} in all`,
      [
        { name: "Tag", text: true, cell: (row) => row.name },
        { name: "Bytes", cell: (row) => formatBytes(row.bytes) },
        { name: "Share", cell: (row) => formatShare(row.bytes, total) },
        { name: "Bar", bar: (row) => row.bytes / total, colour: (row) => tagColour(row.tag) },
      ],
      rows,
    ));
  }
  byId("range").textContent = `${formatTime(view.from)} to ${formatTime(view.to)} of ${formatTime(data.span)}`;
  memoryChart.canvas.setAttribute(
    "aria-label",
    `Memory over time by tag, ${formatTime(view.from)} to ${formatTime(view.to)}; peak ${formatBytes(data.peak.bytes)} at ${formatTime(data.peak.time)}${data.reserved ? `; at most ${formatBytes(data.reserved.peak)} reserved` : ""}`,
  );
};

// Shows the visible time in a few steps, as numbers, when the table is opened.
const drawMemoryTable = () => {
  if (!byId("memory-table").open) return;
  const { level, bins } = visibleBins(24);
  const step = (view.to - view.from) / 24;
  const held = data.reserved && visibleReserved(24);
  const rows = Array.from(bins, (bin, at) => ({ bin, at, time: view.from + at * step }));
  const tags = data.tags.map((name, tag) => ({ name: tagName(name), tag })).filter(({ tag }) => !view.hidden.has(tag));
  const place = byId("memory-table").querySelector(".scroll");
  place.replaceChildren(table(
    "The highest moment of each step",
    [
      { name: "From", cell: (row) => formatTime(row.time) },
      { name: "Total", cell: (row) => formatBytes(shownTotal(level, row.bin)) },
      ...(held ? [{ name: "Reserved", cell: (row) => formatBytes(held[row.at]) }] : []),
      ...tags.map(({ name, tag }) => ({ name, cell: (row) => formatBytes(level.stacks[row.bin * series + tag]) })),
    ],
    rows,
  ));
};

const makeLegend = () => {
  const legend = byId("legend");
  const names = data.tags.map(tagName);
  if (data.reserved) names.push("reserved");
  names.forEach((name, tag) => {
    const label = element("label");
    const box = element("input", undefined, { type: "checkbox" });
    box.checked = true;
    box.addEventListener("change", () => {
      if (box.checked) view.hidden.delete(tag);
      else view.hidden.add(tag);
      changed();
    });
    const swatch = element("span", undefined, { class: "swatch", "aria-hidden": "true" });
    const paint = () => { swatch.style.background = tag === reservedTag ? "var(--reserved)" : tagColour(tag); };
    paint();
    dark.addEventListener("change", paint);
    label.append(box, swatch, element("span", name));
    legend.append(label);
  });
};
