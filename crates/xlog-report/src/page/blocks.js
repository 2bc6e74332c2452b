// Individual blocks: the one under the pointer, and the details of the chosen one.

const blocks = Object.fromEntries(
  Object.entries(data.blocks).map(([name, value]) => [name, value?.kind ? arrays(value) : value]),
);
const blockCount = blocks.born.length;
const stretchPlaces = data.map.segments.map((segment) => segment[4]);

const blockText = (column, block) => blocks.texts[blocks[column][block]];
// Returns the frames of the sampled stack of a block, the innermost first.
const framesOf = (block) => {
  const stack = blocks.stack[block];
  const frames = blocks.stack_frames.subarray(blocks.first_frame[stack], blocks.first_frame[stack + 1]);
  return [...frames].map((frame) => blocks.texts[frame]).filter((frame) => frame !== "");
};
// Times beyond this stand for "never".
const isTime = (time) => time < 1e19;
const endOf = (block) => Math.min(blocks.died[block], data.span);

const addressOf = (block) => {
  const place = blocks.place[block];
  const segment = data.map.segments[lastAt(stretchPlaces, place)];
  if (!segment) return "-";
  return `0x${(BigInt(segment[2]) + BigInt(Math.max(0, Math.round(place - segment[4])))).toString(16)}`;
};

// Returns the block at a time and an offset, within half a pixel; the latest of several.
const blockAt = (time, place, timeSlack = 0, placeSlack = 0) => {
  for (let block = lastAt(blocks.born, time + timeSlack); block >= 0; block--) {
    if (block >= blockCount || blocks.born[block] > time + timeSlack || endOf(block) < time - timeSlack) continue;
    const from = blocks.place[block];
    if (place + placeSlack >= from && place - placeSlack < from + Math.max(1, blocks.bytes[block])) return block;
  }
  return null;
};

const blockInMap = (x, y) => {
  const self = addressChart;
  if (blockCount === 0 || map.rows === 0 || x < self.left || x > self.width - self.right || y < self.top || y > self.height - self.bottom) return null;
  const timeSlack = (view.to - view.from) / self.plotWidth / 2;
  return blockAt(self.time(x), placeOf(y), timeSlack, (view.high - view.low) / self.plotHeight / 2);
};

// Returns the kept blocks that are live at a time, the earliest first.
const liveBlocks = (time, series = null) => {
  const found = [];
  for (let block = 0; block < blockCount && blocks.born[block] <= time; block++) {
    if ((blocks.died[block] > time || blocks.born[block] === time) && (series === null || blocks.series[block] === series)) found.push(block);
  }
  return found;
};

// Finds the tag at a point of the memory chart and, if the page has it, the block.
const inStack = (x, y) => {
  const self = memoryChart;
  if (x < self.left || x > self.width - self.right || y < self.top || y > self.height - self.bottom) return null;
  const time = self.time(x);
  const { level, bins } = visibleBins(Math.max(1, Math.floor(self.plotWidth)));
  const bin = bins[Math.min(bins.length - 1, Math.floor(x - self.left))];
  let bytes = (1 - (y - self.top) / self.plotHeight) * self.topBytes;
  for (let tag = 0; tag < series; tag++) {
    const held = level.stacks[bin * series + tag];
    if (view.hidden.has(tag)) continue;
    if (bytes >= held) {
      bytes -= held;
      continue;
    }
    for (const block of liveBlocks(time, tag)) {
      if (bytes < blocks.bytes[block]) return { tag, held, block };
      bytes -= blocks.bytes[block];
    }
    return { tag, held, block: null };
  }
  return null;
};

const joined = (...parts) => parts.filter((part) => part).join(", ");
const named = (name, text) => (text ? `${name} ${text}` : "");

const usersOf = (block) => {
  const users = new Set();
  for (let use = blocks.first_use[block]; use < blocks.first_use[block + 1]; use++) users.add(blocks.texts[blocks.use_stream[use]] || "no stream");
  return [...users].join(", ");
};

// Describes a block in a few lines.
const describe = (block) => {
  const uses = blocks.uses[block];
  return [
    `${formatBytes(blocks.bytes[block])}, ${tagName(blockText("tag", block))}`,
    joined(addressOf(block), blockText("stream", block), named("thread", blockText("thread", block)), named("query", blockText("query", block))),
    blockText("site", block) && `called at ${blockText("site", block)}`,
    `allocated at ${formatTime(blocks.born[block])}, ${isTime(blocks.died[block])
      ? `freed at ${formatTime(blocks.died[block])}, lived ${formatTime(blocks.died[block] - blocks.born[block])}`
      : "never freed"}`,
    uses > 0
      ? `${formatCount(uses)} ${uses === 1 ? "use" : "uses"}, by ${usersOf(block)}; the last at ${formatTime(blocks.last_use[block])}`
      : data.uses > 0 ? "no use" : "",
  ].filter((line) => line);
};

const tip = byId("tip");

const hideTip = () => { tip.hidden = true; };

const showTip = (lines, event) => {
  if (!lines) return hideTip();
  tip.replaceChildren(...lines.map((line, at) => element(at === 0 ? "strong" : "div", line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + height + 24 > window.innerHeight ? Math.max(4, event.clientY - height - 10) : event.clientY + 16}px`;
};

const keptPart = blockCount < blocks.all
  ? `The page has the ${formatCount(blockCount)} blocks of ${formatCount(blocks.all)} that held the most bytes over time.`
  : `The page has all ${formatCount(blocks.all)} blocks of the log.`;

// Returns the block under the pointer, or a text that describes the position.
const under = (self, x, y) => {
  if (self === addressChart) {
    const block = blockInMap(x, y);
    if (block !== null) return { block, lines: describe(block) };
    const lines = describeSegment(self.time(x), placeOf(y));
    return lines && { block: null, lines };
  }
  if (self !== memoryChart) return null;
  const found = inStack(x, y);
  if (!found) return null;
  if (found.block !== null) return { block: found.block, lines: describe(found.block) };
  return { block: null, lines: [`${tagName(data.tags[found.tag])}: ${formatBytes(found.held)}`, "smaller or shorter blocks of this tag"] };
};

const listenToBlocks = (self) => {
  self.canvas.addEventListener("pointermove", (event) => {
    if (event.buttons !== 0) return hideTip();
    showTip(under(self, event.offsetX, event.offsetY)?.lines, event);
  });
  self.canvas.addEventListener("pointerleave", hideTip);
  self.canvas.addEventListener("click", (event) => {
    const found = under(self, event.offsetX, event.offsetY);
    if (found && found.block !== null) choose(found.block);
  });
};

const choose = (block) => {
  view.block = block;
  changed();
};

// Chooses the next of the blocks live at the selected instant, the largest first.
const chooseNext = (way) => {
  const live = liveBlocks(view.selected).sort((a, b) => blocks.bytes[b] - blocks.bytes[a] || a - b);
  if (live.length === 0) return;
  const at = live.indexOf(view.block);
  choose(live[at < 0 ? 0 : (at + way + live.length) % live.length]);
};

// Zooms all charts to the lifetime of the chosen block, and the address map to its addresses.
const showLife = () => {
  if (view.block === null) return;
  const [born, end] = [blocks.born[view.block], endOf(view.block)];
  const margin = Math.max(end - born, leastSpan) * 0.15;
  setRange(born - margin, end + margin);
  const bytes = Math.max(1, blocks.bytes[view.block]);
  setPlaces(blocks.place[view.block] - 2 * bytes, blocks.place[view.block] + 3 * bytes);
};

const accesses = ["use", "read", "write", "read and write"];

const lifeOf = (block) => {
  const born = blocks.born[block];
  const served = joined(named("served by", blockText("served_by", block)), blocks.latency[block] > 0 ? formatTime(blocks.latency[block]) : "");
  const rows = [{ time: born, event: "allocated", stream: blockText("stream", block), thread: blockText("thread", block), detail: joined(named("query", blockText("query", block)), blockText("site", block), served) }];
  const [first, last] = [blocks.first_use[block], blocks.first_use[block + 1]];
  for (let use = first; use < last; use++) {
    rows.push({ time: blocks.use_time[use], event: accesses[blocks.use_access[use]], stream: blocks.texts[blocks.use_stream[use]], thread: blocks.texts[blocks.use_thread[use]], detail: "" });
  }
  const more = blocks.uses[block] - (last - first);
  if (more > 0) rows.push({ time: blocks.last_use[block], event: `${formatCount(more)} more uses, the last of them`, stream: "", thread: "", detail: "" });
  if (isTime(blocks.died[block])) {
    const idle = isTime(blocks.last_use[block]) ? `${formatTime(blocks.died[block] - blocks.last_use[block])} after the last use` : "";
    rows.push({ time: blocks.died[block], event: "freed", stream: blockText("freed_stream", block), thread: blockText("freed_thread", block), detail: idle });
  } else {
    rows.push({ time: data.span, event: "live at the end of the log", stream: "", thread: "", detail: "" });
  }
  return rows;
};

let shownBlock;
const drawLife = () => {
  if (shownBlock === view.block) return;
  shownBlock = view.block;
  byId("show-life").disabled = view.block === null;
  if (view.block === null) {
    say("block-about", `Click a block in a chart, or press B on a focused chart. ${keptPart}`);
    byId("block-life").replaceChildren();
    byId("block-stack").replaceChildren();
    return;
  }
  const block = view.block;
  say("block-about", describe(block).join("; "));
  const rows = lifeOf(block);
  const span = Math.max(1, endOf(block) - blocks.born[block]);
  show("block-life", table("The life of the block", [
    { name: "At", cell: (row) => formatTime(row.time) },
    { name: "Age", cell: (row) => formatTime(row.time - blocks.born[block]) },
    { name: "Event", text: true, cell: (row) => row.event },
    { name: "Stream", text: true, cell: (row) => row.stream || "-" },
    { name: "Thread", text: true, cell: (row) => row.thread || "-" },
    { name: "Detail", text: true, cell: (row) => row.detail },
    { name: "Bar", bar: (row) => (row.time - blocks.born[block]) / span, colour: () => tagColour(blocks.series[block]) },
  ], rows));
  const frames = framesOf(block);
  byId("block-stack").replaceChildren();
  if (frames.length > 0) show("block-stack", table("Stack of the allocation, the innermost frame first", [{ name: "Frame", text: true, cell: (frame) => frame }], frames));
};

// Draws the blocks that are large enough over the address map, with labels that fit.
const drawBlocks = (self) => {
  const { context } = self;
  const timePixel = (view.to - view.from) / self.plotWidth;
  const placePixel = (view.high - view.low) / self.plotHeight;
  let drawn = 0;
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (let block = 0; block < blockCount && blocks.born[block] <= view.to && drawn < 3000; block++) {
    const [born, end, from, bytes] = [blocks.born[block], endOf(block), blocks.place[block], blocks.bytes[block]];
    if (end < view.from || from > view.high || from + bytes < view.low) continue;
    if ((end - born) / timePixel < 3 || bytes / placePixel < 3) continue;
    drawn += 1;
    const left = Math.max(self.left - 1, self.x(born));
    const right = Math.min(self.width - self.right + 1, self.x(end));
    const top = Math.max(self.top - 1, placeY(from + bytes));
    const bottom = Math.min(self.height - self.bottom + 1, placeY(from));
    const isFaint = matching && !matching[block];
    context.fillStyle = isFaint ? colour("paper") : tagColour(blocks.series[block]);
    context.fillRect(left, top, right - left, bottom - top);
    if (isFaint) {
      context.fillStyle = tagColour(blocks.series[block], 0.2);
      context.fillRect(left, top, right - left, bottom - top);
    }
    context.strokeStyle = colour("paper");
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, top + 0.5, right - left - 1, bottom - top - 1);
    if (isFaint || bottom - top < 13 || right - left < 40) continue;
    const label = labelFor(context, block, right - left - 8);
    if (!label) continue;
    context.fillStyle = labelColour(block);
    context.fillText(label, left + 4, (top + bottom) / 2);
  }
  self.singleBlocks = drawn;
  if (view.block !== null) {
    const left = self.x(blocks.born[view.block]);
    const top = placeY(blocks.place[view.block] + blocks.bytes[view.block]);
    const [right, bottom] = [Math.max(left + 2, self.x(endOf(view.block))), Math.max(top + 2, placeY(blocks.place[view.block]))];
    context.strokeStyle = colour("cursor");
    context.lineWidth = 2;
    context.strokeRect(left - 1, top - 1, right - left + 2, bottom - top + 2);
    // The centre of its visible part.
    const [x, y] = [[left, right, self.left, self.width - self.right], [top, bottom, self.top, self.height - self.bottom]]
      .map(([from, to, least, most]) => (Math.max(from, least) + Math.min(to, most)) / 2);
    self.canvas.dataset.block = `${x} ${y}`;
  }
};

// Returns the longest label that fits the width.
const labelFor = (context, block, width) => {
  const [tag, size] = [tagName(blockText("tag", block)), formatBytes(blocks.bytes[block])];
  const whole = joined(`${tag} ${size}`, blockText("stream", block), named("thread", blockText("thread", block)));
  return [whole, `${tag} ${size}`, tag, size].find((label) => label.length * 4 < width && context.measureText(label).width <= width);
};

const labelColour = (block) => {
  const [red, green, blue] = seriesColours()[blocks.series[block]] ?? [128, 128, 128];
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000" : "#fff";
};

let seriesColoursMade = null;
const seriesColours = () => {
  seriesColoursMade ??= data.tags.map((_, tag) => rgb(tagColour(tag)));
  return seriesColoursMade;
};
