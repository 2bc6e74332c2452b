// The static tables.

const more = (shown, all, what) => (all > shown ? `; the first ${formatCount(shown)} of ${formatCount(all)} ${what}` : "");

const histogramTable = (id, caption, rows, unit) => {
  const most = rows.reduce((most, row) => Math.max(most, row[1]), 1);
  show(id, table(caption, [
    { name: "From", cell: (row) => unit(row[0]) },
    { name: "Blocks", cell: (row) => formatCount(row[1]) },
    { name: "Bytes", cell: (row) => formatBytes(row[2]) },
    { name: "Bar", bar: (row) => row[1] / most },
  ], rows));
};

const peakTables = () => {
  const { peak } = data;
  show("holders", table(
    `${formatBytes(peak.bytes)} in ${formatCount(peak.blocks)} blocks at ${formatTime(peak.time)}${more(peak.holders.length, peak.all_holders, "tags")}`,
    [
      { name: "Tag", text: true, cell: (row) => tagName(row[0]) },
      { name: "Bytes", cell: (row) => formatBytes(row[1]) },
      { name: "Share", cell: (row) => formatShare(row[1], peak.bytes) },
      { name: "Blocks", cell: (row) => formatCount(row[2]) },
      { name: "Bar", bar: (row) => row[1] / peak.bytes, colour: (row) => tagColour(Math.max(0, data.tags.indexOf(row[0]))) },
    ],
    peak.holders,
  ));
  show("largest", table("The largest blocks at the peak", [
    { name: "Address", cell: (row) => row.address },
    { name: "Bytes", cell: (row) => formatBytes(row.bytes) },
    { name: "Tag", text: true, cell: (row) => tagName(data.tags[row.tag] ?? "") },
    { name: "Stream", cell: (row) => row.stream ?? "-" },
    { name: "Allocated at", cell: (row) => formatTime(row.born) },
  ], peak.largest));
  show("all-tags", table(`All tags${more(data.by_tag.length, data.all_tags, "tags")}`, [
    { name: "Tag", text: true, cell: (row) => tagName(row.tag) },
    { name: "Own peak", cell: (row) => formatBytes(row.peak) },
    { name: "In all", cell: (row) => formatBytes(row.total) },
    { name: "Allocations", cell: (row) => formatCount(row.allocations) },
    { name: "Failures", cell: (row) => formatCount(row.failures) },
    { name: "Never freed", cell: (row) => formatBytes(row.live) },
  ], data.by_tag));
  byId("sites-more").hidden = data.by_site.length === 0;
  show("all-sites", table(`Call sites${more(data.by_site.length, data.all_sites, "call sites")}`, [
    { name: "Call site", button: (row) => row.tag, action: (row) => { byId("filter-site").value = row.tag; changed(); byId("filters").scrollIntoView(); } },
    { name: "Own peak", cell: (row) => formatBytes(row.peak) },
    { name: "In all", cell: (row) => formatBytes(row.total) },
    { name: "Allocations", cell: (row) => formatCount(row.allocations) },
    { name: "Failures", cell: (row) => formatCount(row.failures) },
    { name: "Never freed", cell: (row) => formatBytes(row.live) },
  ], data.by_site));
};

const streamTables = () => {
  byId("streams-about").textContent = data.uses > 0
    ? "Shading is calls. An arrow is a block that one stream touched after another; red is an allocation that had to wait. Of many arrows a part is drawn."
    : "Shading is calls. An arrow is a block freed on another stream than its own; red is an allocation that had to wait. This log has no records of uses: log with uses to see which streams use which blocks.";
  show("lanes", table("Calls by stream", [
    { name: "Stream", text: true, cell: (row) => row.name },
    { name: "Calls", cell: (row) => formatCount(row.totals[0]) },
    { name: "Handovers to it", cell: (row) => formatCount(row.totals[1]) },
    { name: "Allocations that waited", cell: (row) => formatCount(row.totals[2]) },
  ], lanes.names.map((name, lane) => ({ name, totals: data.lanes.totals[lane] }))));
  const pairs = [...lanes.pairs].sort((a, b) => b[2] - a[2]).slice(0, 200);
  show("pairs", table(`Blocks that went from stream to stream${more(pairs.length, lanes.pairs.length, "pairs")}`, [
    { name: "From", text: true, cell: (row) => lanes.names[row[0]] },
    { name: "To", text: true, cell: (row) => lanes.names[row[1]] },
    { name: "Times", cell: (row) => formatCount(row[2]) },
  ], pairs));
  show("segments", table("Stretches of addresses", [
    { name: "First address", cell: (row) => row[2] },
    { name: "Bytes", cell: (row) => formatBytes(row[3]) },
    { name: "Device", cell: (row) => row[1] },
    { name: "Process", cell: (row) => row[0] },
  ], data.map.segments));
};

const idleTables = () => {
  const { idle } = data;
  if (!idle) {
    byId("idle-about").textContent = "This log has no records of uses, so it cannot say when a block was last used.";
    byId("idle-more").hidden = true;
    return;
  }
  byId("idle-about").textContent = "From the last use of a block to its free, or to the end of the log. Memory that could have been given back.";
  show("idle-tags", table("Held idle, by tag", [
    { name: "Tag", text: true, cell: (row) => tagName(row[0]) },
    { name: "Blocks", cell: (row) => formatCount(row[1]) },
    { name: "Without a use", cell: (row) => formatCount(row[2]) },
    { name: "Idle, bytes × s", cell: (row) => formatBytes(row[4]) },
    { name: "Of what it held", cell: (row) => formatShare(row[4], row[3]) },
    { name: "Bar", bar: (row) => (row[3] > 0 ? row[4] / row[3] : 0) },
  ], idle.tags));
  histogramTable("idle-times", "Time from last use to free", idle.histogram, formatTime);
  show("idle-worst", table("The most bytes × time first", [
    { name: "Address", cell: (row) => row[0] },
    { name: "Bytes", cell: (row) => formatBytes(row[1]) },
    { name: "Tag", text: true, cell: (row) => tagName(data.tags[row[2]] ?? "") },
    { name: "Idle", cell: (row) => formatTime(row[3]) },
    { name: "Freed", cell: (row) => (row[4] ? "yes" : "never") },
  ], idle.worst));
};

const endTables = () => {
  show("failed", data.failed.length === 0
    ? element("p", "No call failed.")
    : table(`${formatCount(data.failures)} calls failed${more(data.failed.length, data.failures, "calls")}`, [
      { name: "At", cell: (row) => formatTime(row.time) },
      { name: "Bytes", cell: (row) => formatBytes(row.bytes) },
      { name: "Tag", text: true, cell: (row) => tagName(row.tag) },
      { name: "Call site", text: true, cell: (row) => row.site || "-" },
      { name: "Kind", text: true, cell: (row) => row.kind },
      { name: "Message", text: true, cell: (row) => row.message },
    ], data.failed));
  if (data.live[1] === 0) {
    show("leak-tags", element("p", data.complete ? "Every block was freed." : "Every block in these records was freed; the log is incomplete."));
    return;
  }
  show("leak-tags", table(`${formatBytes(data.live[0])} in ${formatCount(data.live[1])} blocks ${data.complete ? "was never freed" : "has no free in these records, which are incomplete"}`, [
    { name: "Tag", text: true, cell: (row) => tagName(row[0]) },
    { name: "Bytes", cell: (row) => formatBytes(row[1]) },
    { name: "Blocks", cell: (row) => formatCount(row[2]) },
    { name: "Bar", bar: (row) => row[1] / data.live[0] },
  ], data.leak_tags));
  show("leak-blocks", table(`The largest${more(data.leaks.length, data.live[1], "blocks")}`, [
    { name: "Address", cell: (row) => row.address },
    { name: "Bytes", cell: (row) => formatBytes(row.bytes) },
    { name: "Tag", text: true, cell: (row) => tagName(row.tag) },
    { name: "Call site", text: true, cell: (row) => row.site || "-" },
    { name: "Stream", cell: (row) => row.stream ?? "-" },
    { name: "Age", cell: (row) => formatTime(row.age) },
  ], data.leaks));
};

const changeColumns = (unit) => [
  { name: "Before", cell: (row) => unit(row)(row.change.before) },
  { name: "After", cell: (row) => unit(row)(row.change.after) },
  {
    name: "Change",
    className: (row) => (row.change.after > row.change.before ? "up" : ""),
    cell: (row) => {
      const difference = row.change.after - row.change.before;
      if (difference === 0) return "same";
      return `${difference > 0 ? "+" : "-"}${unit(row)(Math.abs(difference))}`;
    },
  },
];

const compareTables = () => {
  if (!data.other) return;
  const { comparison, log } = data.other;
  byId("compare").hidden = false;
  byId("compare-about").textContent = `Before: ${log}. It is the dotted line in the chart of memory over time.`;
  const { total } = comparison;
  const row = (name, change, unit) => ({ name, change, unit });
  show("compare-total", table("Totals", [
    { name: "Figure", text: true, cell: (row) => row.name }, ...changeColumns((row) => row.unit),
  ], [
    row("Peak", total.peak_bytes, formatBytes), row("Allocated in all", total.total_bytes, formatBytes),
    row("Never freed", total.live_bytes, formatBytes), row("Allocations", total.allocations, formatCount),
    row("Failures", total.failures, formatCount), row("Records", comparison.records, formatCount),
    row("Duration", comparison.duration_nanos, formatTime),
  ]));
  const tags = comparison.by_tag.slice(0, 200).map((tag) => ({ name: tagName(tag.tag), change: tag.peak_bytes }));
  show("compare-tags", table(`Own peaks by tag, the largest changes first${more(tags.length, comparison.by_tag.length, "tags")}`, [
    { name: "Tag", text: true, cell: (row) => row.name }, ...changeColumns(() => formatBytes),
  ], tags));
};
