// Keys, buttons and the pointer. All charts share one time range and one selected instant.

// Steps one column of pixels, but at least one bin, so that a step always moves.
const step = (way, times) => {
  const { starts } = levels[0];
  const pixel = (view.to - view.from) / Math.max(1, memoryChart.plotWidth);
  const bin = selectedBin();
  const neighbour = starts[Math.min(Math.max(bin + way, 0), starts.length - 1)];
  const far = view.selected + way * times * pixel;
  if (times === 1 && Math.abs(neighbour - view.selected) > pixel) return select(neighbour);
  return select(far);
};

const peakView = () => {
  const span = Math.min(view.to - view.from, data.span);
  if (data.peak.time < view.from || data.peak.time > view.to) setRange(data.peak.time - span / 2, data.peak.time + span / 2);
  select(data.peak.time);
};

const showAll = () => {
  setRange(0, data.span);
  setPlaces(0, map.rows * map.row_bytes);
};

const panPlaces = (part) => setPlaces(view.low + (view.high - view.low) * part, view.high + (view.high - view.low) * part);

const actions = {
  ArrowLeft: (event) => step(-1, event.shiftKey ? 10 : 1),
  ArrowRight: (event) => step(1, event.shiftKey ? 10 : 1),
  "+": () => zoom(0.5),
  "=": () => zoom(0.5),
  "-": () => zoom(2),
  _: () => zoom(2),
  "[": () => pan(-0.25),
  "]": () => pan(0.25),
  PageUp: () => pan(-0.9),
  PageDown: () => pan(0.9),
  Home: () => select(0),
  End: () => select(data.span),
  0: showAll,
  Escape: showAll,
  ArrowUp: () => panPlaces(0.25),
  ArrowDown: () => panPlaces(-0.25),
  "}": () => zoomPlaces(0.5),
  "{": () => zoomPlaces(2),
  b: () => chooseNext(1),
  B: () => chooseNext(-1),
  Enter: showLife,
  p: peakView,
  P: peakView,
};

const listenTo = (self) => {
  const { canvas } = self;
  canvas.addEventListener("keydown", (event) => {
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action(event);
  });
  let began = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    began = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (began === null || Math.abs(event.offsetX - began) < 4) return;
    changed();
    // Drawn after the charts, on top of this one.
    requestAnimationFrame(() => {
      if (began === null) return;
      self.context.fillStyle = "rgb(128 128 128 / 0.3)";
      self.context.fillRect(Math.min(began, event.offsetX), self.top, Math.abs(event.offsetX - began), self.plotHeight);
    });
  });
  canvas.addEventListener("pointerup", (event) => {
    if (began === null) return;
    const [from, to] = [Math.min(began, event.offsetX), Math.max(began, event.offsetX)];
    began = null;
    if (to - from < 4) select(self.time(event.offsetX));
    else setRange(self.time(from), self.time(to));
  });
  canvas.addEventListener("pointercancel", () => { began = null; });
  canvas.addEventListener("wheel", (event) => {
    if (event.altKey && self === addressChart) {
      event.preventDefault();
      zoomPlaces(event.deltaY > 0 ? 1.25 : 0.8, placeOf(event.offsetY));
    } else if (event.ctrlKey) {
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, self.time(event.offsetX));
    } else if (event.shiftKey || event.deltaX !== 0) {
      event.preventDefault();
      pan(Math.sign(event.deltaX || event.deltaY) * 0.1);
    }
  }, { passive: false });
};

const buttons = {
  "zoom-in": () => zoom(0.5), "zoom-out": () => zoom(2), "pan-left": () => pan(-0.25), "pan-right": () => pan(0.25),
  reset: showAll, "to-peak": peakView,
  "next-block": () => chooseNext(1), "previous-block": () => chooseNext(-1), "show-life": showLife, "filter-clear": clearFilters,
};
