// Formats numbers and names, and creates elements from text only: no text of a log becomes markup.

// Formats bytes in the largest unit that leaves at least one: quarters exactly, else one decimal. Matches xlog_base::size_text.
const formatBytes = (bytes) => {
  const sign = bytes < 0 ? "-" : "";
  const size = Math.abs(bytes);
  if (size < 1024) return `${Math.round(bytes)} bytes`;
  let [unit, text] = [1, ""];
  for (const name of ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]) {
    unit *= 1024;
    const tenths = Math.round((10 * size) / unit);
    const exact = Number.isInteger((4 * size) / unit);
    text = `${sign}${exact ? size / unit : (tenths / 10).toFixed(1)} ${name}`;
    if (tenths < 10240) break;
  }
  return text;
};

const formatCount = (count) => Math.round(count).toLocaleString("en-US");

const formatTime = (nanos) => {
  const units = [[1e9, "s", 3], [1e6, "ms", 3], [1e3, "µs", 1]];
  for (const [unit, name, digits] of units) {
    if (Math.abs(nanos) >= unit) return `${(nanos / unit).toFixed(digits)} ${name}`;
  }
  return `${Math.round(nanos)} ns`;
};

const formatShare = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "-");

const tagName = (name) => (name === "" ? "untagged" : name);

// Colours of tags by index, far apart in hue and lightness on light and dark backgrounds.
const hues = [211, 28, 145, 350, 265, 52, 180, 320, 95, 235, 10, 165, 290, 70];

const dark = matchMedia("(prefers-color-scheme: dark)");

const tagColour = (tag, alpha = 1) => {
  if (data.other_tags > 0 && tag === series - 1) return `hsl(210 8% ${dark.matches ? 55 : 62}% / ${alpha})`;
  const lightness = (dark.matches ? [58, 48, 66] : [46, 58, 36])[tag % 3];
  return `hsl(${hues[tag % hues.length]} ${dark.matches ? 62 : 68}% ${lightness}% / ${alpha})`;
};

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const byId = (id) => document.getElementById(id);

const element = (name, text, options = {}) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(options)) made.setAttribute(key, value);
  return made;
};

// Creates a table. Columns: { name, text?: left-aligned, cell(row), bar?(row) from 0 to 1, className?(row) }.
const table = (caption, columns, rows) => {
  const made = element("table");
  made.append(element("caption", caption));
  const head = made.createTHead().insertRow();
  for (const column of columns) head.append(element("th", column.name, { scope: "col", class: column.text ? "text" : "" }));
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    columns.forEach((column, at) => {
      const cell = at === 0 ? element("th", undefined, { scope: "row" }) : element("td");
      if (column.button) {
        const button = element("button", column.button(row), { type: "button" });
        button.addEventListener("click", () => column.action(row));
        cell.append(button);
      } else if (column.bar) {
        cell.className = "bar";
        const bar = element("span", undefined, { "aria-hidden": "true" });
        bar.style.width = `${100 * Math.min(1, Math.max(0, column.bar(row)))}%`;
        if (column.colour) bar.style.background = column.colour(row);
        cell.append(bar);
      } else {
        cell.textContent = column.cell(row);
        cell.className = [column.text ? "text" : "", column.className?.(row) ?? ""].join(" ").trim();
      }
      line.append(cell);
    });
  }
  return made;
};

const show = (id, content) => byId(id).replaceChildren(content);

// Announces a text in a live region unless it was just announced.
const say = (id, text) => {
  const place = byId(id);
  if (place.textContent !== text) place.textContent = text;
};

// Makes overflowing regions focusable and names them, so that keys can scroll them.
const nameScrollers = () => {
  for (const place of document.querySelectorAll(".scroll")) {
    const overflows = place.scrollHeight > place.clientHeight || place.scrollWidth > place.clientWidth;
    if (!overflows) {
      for (const name of ["tabindex", "role", "aria-label"]) place.removeAttribute(name);
      continue;
    }
    place.tabIndex = 0;
    place.setAttribute("role", "region");
    place.setAttribute("aria-label", place.querySelector("caption")?.textContent ?? "Table");
  }
};
