// Assembles the page: the first chart at once, the rest when the browser is idle.

const makeHead = () => {
  byId("title").textContent = `Device memory: ${data.log}`;
  const began = data.began === null ? "" : `, from ${new Date(data.began).toISOString().replace("T", " ").slice(0, 19)} UTC`;
  byId("subtitle").textContent = `${formatCount(data.records)} records over ${formatTime(data.span)}${began}${data.device ? `, ${data.device}` : ""}`;
  const figures = [
    ["Peak", formatBytes(data.peak.bytes), data.budget !== null && data.peak.bytes > data.budget],
    ["At", formatTime(data.peak.time)],
    ["Blocks at the peak", formatCount(data.peak.blocks)],
    ["Allocations", formatCount(data.allocations)],
    ["Frees", formatCount(data.frees)],
    ["Failures", formatCount(data.failures), data.failures > 0],
    [data.complete ? "Never freed" : "Without a free", data.live[1] === 0 ? "nothing" : `${formatBytes(data.live[0])} in ${formatCount(data.live[1])}`, data.live[1] > 0],
  ];
  if (data.reserved) figures.splice(1, 0, ["Reserved at the peak", formatBytes(data.reserved.at_peak)], ["Reserved at most", formatBytes(data.reserved.peak)]);
  if (data.budget !== null) figures.splice(1, 0, ["Budget", formatBytes(data.budget)]);
  for (const [name, value, alarm] of figures) {
    const pair = element("div", undefined, alarm ? { class: "alarm" } : {});
    pair.append(element("dt", name), element("dd", value));
    byId("figures").append(pair);
  }
  const notes = byId("notes");
  notes.hidden = data.notes.length === 0;
  notes.append(...data.notes.map((note) => element("li", note)));
};

const makeSections = () => {
  const links = [...document.querySelectorAll("main > section:not([hidden])")].map((section) => {
    const item = element("li");
    item.append(element("a", section.querySelector("h2").textContent, { href: `#${section.id}` }));
    return item;
  });
  byId("sections").append(...links);
};

const drawAll = () => {
  drawFilter();
  drawMemory();
  drawInstant();
  drawAddresses();
  drawLanes();
  drawMemoryTable();
  drawLife();
  keepView();
  nameScrollers();
};

document.querySelector("main").hidden = false;
makeHead();
makeLegend();
makeFilters();
takeView();
drawMemory();
drawInstant();
performance.mark("first-picture");

compareTables();
makeSections();
const staticTables = () => {
  peakTables();
  makeReservedTable();
  streamTables();
  histogramTable("sizes", "Blocks by size", data.sizes, formatBytes);
  histogramTable("lifetimes", "Blocks by time from allocation to free", data.lifetimes, formatTime);
  idleTables();
  endTables();
};
staticTables();
view.listeners.push(drawAll);
for (const self of [memoryChart, addressChart, laneChart]) listenTo(self);
for (const self of [memoryChart, addressChart]) listenToBlocks(self);
for (const [id, action] of Object.entries(buttons)) byId(id).addEventListener("click", action);
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", changed);
window.addEventListener("hashchange", takeView);
new ResizeObserver(changed).observe(document.body);
dark.addEventListener("change", () => {
  mapPicture = null;
  shownInstant = null;
  shownBlock = undefined;
  seriesColoursMade = null;
  staticTables();
  changed();
});
drawAll();
performance.mark("complete");
