// Searches individual blocks: matches are listed and stay bright in the address map.

const filterIds = ["filter-tag", "filter-stream", "filter-thread", "filter-query", "filter-site", "filter-least", "filter-most"];
const mostListed = 100;

const parseSize = (text) => {
  const units = { "": 1, b: 1, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12 };
  const found = /^\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)\s*$/i.exec(text);
  const unit = found && units[found[2].toLowerCase()];
  return unit ? Number(found[1]) * unit : null;
};

// Whether each block matches; null without a filter.
let matching = null;
let listedFor;

const findBlocks = () => {
  const [tag, stream, thread, query, site, least, most] = filterIds.map((id) => byId(id).value.trim());
  const limits = [["filter-least", least], ["filter-most", most]].map(([id, text]) => {
    const size = text === "" ? undefined : parseSize(text);
    byId(id).setAttribute("aria-invalid", String(size === null));
    return size;
  });
  const shownOnly = byId("filter-shown").checked;
  if (![tag, stream, thread, query, site, least, most].some((text) => text !== "") && !shownOnly) return null;
  const words = tag.toLowerCase();
  const place = site.toLowerCase();
  const found = new Uint8Array(blockCount);
  for (let block = 0; block < blockCount; block++) {
    found[block] = (words === "" || blockText("tag", block).toLowerCase().includes(words) || (words.startsWith("0x") && addressOf(block).startsWith(words)))
      && (stream === "" || blockText("stream", block) === stream)
      && (thread === "" || blockText("thread", block) === thread)
      && (query === "" || blockText("query", block) === query)
      && (place === "" || blockText("site", block).toLowerCase().includes(place) || framesOf(block).some((frame) => frame.toLowerCase().includes(place)))
      && blocks.bytes[block] >= (limits[0] ?? 0) && blocks.bytes[block] <= (limits[1] ?? Infinity)
      && (!shownOnly || (blocks.born[block] <= view.to && endOf(block) >= view.from)) ? 1 : 0;
  }
  return found;
};

const drawFilter = () => {
  const asked = [...filterIds.map((id) => byId(id).value), byId("filter-shown").checked && `${view.from} ${view.to}`].join("\n");
  if (asked === listedFor) return;
  listedFor = asked;
  matching = findBlocks();
  if (!matching) {
    say("filter-found", keptPart);
    byId("filter-list").replaceChildren();
    return;
  }
  const found = [];
  let bytes = 0;
  for (let block = 0; block < blockCount; block++) {
    if (!matching[block]) continue;
    found.push(block);
    bytes += blocks.bytes[block];
  }
  say("filter-found", `${formatCount(found.length)} of ${formatCount(blockCount)} blocks match, ${formatBytes(bytes)} allocated in all`);
  found.sort((a, b) => blocks.bytes[b] - blocks.bytes[a] || a - b);
  show("filter-list", table(`Blocks that match, the largest first${more(Math.min(found.length, mostListed), found.length, "blocks")}`, [
    { name: "Address", button: (block) => addressOf(block), action: (block) => { select(blocks.born[block]); choose(block); } },
    { name: "Bytes", cell: (block) => formatBytes(blocks.bytes[block]) },
    { name: "Tag", text: true, cell: (block) => tagName(blockText("tag", block)) },
    { name: "Stream", text: true, cell: (block) => blockText("stream", block) || "-" },
    { name: "Thread", cell: (block) => blockText("thread", block) || "-" },
    { name: "Query", cell: (block) => blockText("query", block) || "-" },
    { name: "Call site", text: true, cell: (block) => blockText("site", block) || "-" },
    { name: "Allocated at", cell: (block) => formatTime(blocks.born[block]) },
    { name: "Lived", cell: (block) => (isTime(blocks.died[block]) ? formatTime(blocks.died[block] - blocks.born[block]) : "to the end") },
  ], found.slice(0, mostListed)));
};

// Fills each filter with the values of its column, up to a limit.
const makeFilters = () => {
  for (const [id, column] of [["filter-stream", "stream"], ["filter-thread", "thread"], ["filter-query", "query"]]) {
    const values = [...new Set(blocks[column])].map((at) => blocks.texts[at]).filter((text) => text !== "");
    values.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    byId(id).append(element("option", "all", { value: "" }), ...values.slice(0, 1000).map((text) => element("option", text, { value: text })));
  }
  for (const id of [...filterIds, "filter-shown"]) byId(id).addEventListener("input", changed);
};

const clearFilters = () => {
  for (const id of filterIds) byId(id).value = "";
  byId("filter-shown").checked = false;
  changed();
};
