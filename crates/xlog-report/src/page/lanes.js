// Streams as lanes: their activity, waits, and handovers of blocks between them.

const laneChart = chart("lane-chart", 130, 26);
const lanes = {
  ...data.lanes,
  calls: arrays(data.lanes.calls), handovers: arrays(data.lanes.handovers), waits: arrays(data.lanes.waits),
  times: arrays(data.lanes.arrow_times), from: arrays(data.lanes.arrow_from), to: arrays(data.lanes.arrow_to),
};
// The maximum number of arrows drawn at a time.
const mostArrows = 300;
const laneCount = lanes.names.length;
const busiest = lanes.calls.reduce((most, calls) => Math.max(most, calls), 1);

const drawLanes = () => {
  const self = laneChart;
  const { context } = self;
  self.canvas.style.height = `${Math.max(100, 44 + 22 * laneCount)}px`;
  self.begin();
  self.timeAxis();
  const height = self.plotHeight / Math.max(1, laneCount);
  const middle = (lane) => self.top + (lane + 0.5) * height;
  self.inside(() => {
    const last = lastAt(columnStarts, view.to);
    for (let column = lastAt(columnStarts, view.from); column <= last; column++) {
      const from = Math.floor(self.x(columnStarts[column]));
      const to = Math.floor(self.x(column + 1 < columnStarts.length ? columnStarts[column + 1] : data.span));
      const width = Math.max(to - from, 1);
      for (let lane = 0; lane < laneCount; lane++) {
        const at = column * laneCount + lane;
        if (lanes.calls[at] > 0) {
          const part = 0.2 + (0.8 * Math.log1p(lanes.calls[at])) / Math.log1p(busiest);
          context.fillStyle = tagColour(0, part);
          context.fillRect(from, middle(lane) - height * 0.35, width, height * 0.7);
        }
        if (lanes.waits[at] > 0) {
          context.fillStyle = colour("alarm");
          context.fillRect(from, middle(lane) + height * 0.2, Math.max(width, 2), height * 0.15);
        }
      }
    }
    drawArrows(context, middle);
  });
  context.fillStyle = colour("ink");
  context.textAlign = "right";
  context.textBaseline = "middle";
  lanes.names.forEach((name, lane) => {
    context.fillText(name.length > 18 ? `${name.slice(0, 17)}…` : name, self.left - 8, middle(lane));
  });
  self.cursor();
  drawLaneInstant();
};

const drawArrows = (context, middle) => {
  if (lanes.times.length === 0) return;
  const first = lastAt(lanes.times, view.from);
  const last = lastAt(lanes.times, view.to);
  const stride = Math.max(1, Math.ceil((last - first + 1) / mostArrows));
  context.strokeStyle = context.fillStyle = colour("ink");
  context.lineWidth = 1;
  for (let at = first; at <= last; at += stride) {
    const x = laneChart.x(lanes.times[at]);
    const [from, to] = [middle(lanes.from[at]), middle(lanes.to[at])];
    const way = Math.sign(to - from) || 1;
    context.beginPath();
    context.moveTo(x, from);
    context.lineTo(x, to);
    context.stroke();
    context.beginPath();
    context.moveTo(x, to);
    context.lineTo(x - 3, to - 5 * way);
    context.lineTo(x + 3, to - 5 * way);
    context.fill();
  }
};

const drawLaneInstant = () => {
  const column = lastAt(columnStarts, view.selected);
  const busy = [];
  for (let lane = 0; lane < laneCount; lane++) {
    const calls = lanes.calls[column * laneCount + lane];
    if (calls > 0) busy.push(`${lanes.names[lane]} ${formatCount(calls)} calls`);
  }
  say("lane-instant", `Around ${formatTime(view.selected)}: ${busy.slice(0, 4).join(", ") || "no calls"}`);
  const handovers = lanes.pairs.reduce((sum, pair) => sum + pair[2], 0);
  laneChart.canvas.setAttribute(
    "aria-label",
    `Streams over time: ${laneCount} lanes, ${formatCount(handovers)} handovers between streams`,
  );
};
