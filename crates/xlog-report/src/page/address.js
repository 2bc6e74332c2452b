// The view is stored in the URL fragment, so a copied URL shows the current view.

const places = {
  from: { get: () => view.from, is: (value) => value === 0 },
  to: { get: () => view.to, is: (value) => value === Math.max(data.span, 1) },
  at: { get: () => view.selected, is: (value) => value === data.peak.time },
  low: { get: () => view.low, is: (value) => value === 0 },
  high: { get: () => view.high, is: (value) => value === Math.max(1, map.rows * map.row_bytes) },
};

const viewText = () => {
  const params = new URLSearchParams();
  for (const [name, { get, is }] of Object.entries(places)) if (!is(get())) params.set(name, String(get()));
  if (view.block !== null) params.set("block", String(view.block));
  if (view.hidden.size > 0) params.set("hide", [...view.hidden].sort((a, b) => a - b).join("-"));
  for (const id of filterIds) if (byId(id).value !== "") params.set(id.slice("filter-".length), byId(id).value);
  return params.toString();
};

let keptView = "";
let keeping = null;
const storeView = () => {
  clearTimeout(keeping);
  const text = viewText();
  if (text === keptView) return;
  keptView = text;
  history.replaceState(null, "", `#${text || "memory"}`);
};
const keepView = () => {
  clearTimeout(keeping);
  keeping = setTimeout(storeView, 150);
};
// A user who copies the URL leaves the page first.
window.addEventListener("blur", storeView);

// Restores the view from the URL; ignores a fragment that is not a view.
const takeView = () => {
  const text = location.hash.slice(1);
  if (!text.includes("=") || text === keptView) return;
  keptView = text;
  const params = new URLSearchParams(text);
  const number = (name, otherwise) => {
    const value = Number(params.get(name) ?? NaN);
    return Number.isFinite(value) ? value : otherwise;
  };
  setRange(number("from", 0), number("to", data.span));
  setPlaces(number("low", 0), number("high", map.rows * map.row_bytes));
  view.selected = Math.min(Math.max(number("at", data.peak.time), 0), data.span);
  const block = number("block", -1);
  view.block = Number.isInteger(block) && block >= 0 && block < blockCount ? block : null;
  view.hidden = new Set((params.get("hide") ?? "").split("-").filter((tag) => tag !== "").map(Number).filter((tag) => tag >= 0 && tag <= reservedTag));
  document.querySelectorAll("#legend input").forEach((box, tag) => { box.checked = !view.hidden.has(tag); });
  for (const id of filterIds) byId(id).value = params.get(id.slice("filter-".length)) ?? "";
  changed();
};
