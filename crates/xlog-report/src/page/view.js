// The visible time range and the selected instant, shared by all charts. Redraws are batched per frame.

const view = { from: 0, to: Math.max(data.span, 1), selected: data.peak.time, hidden: new Set(), block: null, low: 0, high: 1, listeners: [] };

// The minimum time range; zooming in further shows nothing more.
const leastSpan = Math.min(Math.max(data.span, 1), 100);

let drawing = false;
const changed = () => {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    for (const listener of view.listeners) listener();
  });
};

const setRange = (from, to) => {
  const whole = Math.max(data.span, 1);
  const span = Math.min(Math.max(to - from, leastSpan), whole);
  const start = Math.min(Math.max(from + (to - from - span) / 2, 0), whole - span);
  view.from = start;
  view.to = start + span;
  changed();
};

// Zooms around an instant, which keeps its position on the screen.
const zoom = (factor, around = view.selected) => {
  const centre = Math.min(Math.max(around, view.from), view.to);
  setRange(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
};

const pan = (part) => {
  const step = (view.to - view.from) * part;
  setRange(view.from + step, view.to + step);
};

const select = (time) => {
  view.selected = Math.min(Math.max(time, 0), data.span);
  const span = view.to - view.from;
  if (view.selected < view.from) setRange(view.selected - span / 10, view.selected + (span * 9) / 10);
  else if (view.selected > view.to) setRange(view.selected - (span * 9) / 10, view.selected + span / 10);
  else changed();
};

// Returns the bin of the finest level at the selected instant.
const selectedBin = () => lastAt(levels[0].starts, view.selected);

// Creates a canvas sized to its element, with the drawing that all charts share.
const chart = (id, left, bottom) => {
  const canvas = byId(id);
  const context = canvas.getContext("2d");
  const self = { canvas, context, left, bottom, top: 8, right: 12, width: 0, height: 0 };
  self.begin = () => {
    const ratio = window.devicePixelRatio || 1;
    self.width = canvas.clientWidth;
    self.height = canvas.clientHeight;
    const [wide, high] = [Math.round(self.width * ratio), Math.round(self.height * ratio)];
    if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colour("paper");
    context.fillRect(0, 0, self.width, self.height);
    context.font = "12px system-ui, 'Open Sans', sans-serif";
    self.plotWidth = Math.max(1, self.width - self.left - self.right);
    self.plotHeight = Math.max(1, self.height - self.top - self.bottom);
  };
  self.x = (time) => self.left + ((time - view.from) / (view.to - view.from)) * self.plotWidth;
  self.time = (x) => view.from + ((x - self.left) / self.plotWidth) * (view.to - view.from);
  self.inside = (draw) => {
    context.save();
    context.beginPath();
    context.rect(self.left, self.top, self.plotWidth, self.plotHeight);
    context.clip();
    draw();
    context.restore();
  };
  self.timeAxis = () => {
    context.fillStyle = colour("quiet");
    context.strokeStyle = colour("rule");
    context.lineWidth = 1;
    context.textAlign = "center";
    context.textBaseline = "top";
    const span = view.to - view.from;
    const rough = span / Math.max(2, self.plotWidth / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
    for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
      const x = Math.round(self.x(time)) + 0.5;
      context.beginPath();
      context.moveTo(x, self.top);
      context.lineTo(x, self.height - self.bottom + 4);
      context.stroke();
      context.fillText(axisTime(time, step), Math.min(Math.max(x, 30), self.width - 30), self.height - self.bottom + 6);
    }
  };
  self.cursor = () => {
    if (view.selected < view.from || view.selected > view.to) return;
    const x = Math.round(self.x(view.selected)) + 0.5;
    context.strokeStyle = colour("cursor");
    context.lineWidth = 1;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x, self.top);
    context.lineTo(x, self.height - self.bottom);
    context.stroke();
    context.setLineDash([]);
  };
  return self;
};

// Formats a time on an axis, with enough digits to distinguish two marks.
const axisTime = (time, step) => {
  const [unit, name] = data.span >= 1e9 || step >= 1e8 ? [1e9, "s"] : data.span >= 1e6 ? [1e6, "ms"] : [1e3, "µs"];
  const digits = Math.min(9, Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9)));
  return `${(time / unit).toFixed(digits)} ${name}`;
};
