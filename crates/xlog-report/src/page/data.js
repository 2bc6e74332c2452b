// The data of the page: figures from JSON, pictures from arrays in one base64 blob.

const data = JSON.parse(document.getElementById("data").textContent);

const arrays = (() => {
  const text = atob(document.getElementById("blob").textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  const kinds = { f64: Float64Array, f32: Float32Array, u32: Uint32Array, u8: Uint8Array };
  return (array) => new kinds[array.kind](bytes.buffer, array.offset, array.length);
})();

const series = data.tags.length;

// Levels of detail: the first has all bins; each further one keeps the higher of every two.
const levels = (() => {
  const finest = { starts: arrays(data.starts), stacks: arrays(data.stacks), lows: arrays(data.lows), reserved: data.reserved && arrays(data.reserved.bins) };
  finest.totals = new Float64Array(finest.starts.length);
  for (let bin = 0; bin < finest.totals.length; bin++) {
    let total = 0;
    for (let tag = 0; tag < series; tag++) total += finest.stacks[bin * series + tag];
    finest.totals[bin] = total;
  }
  const all = [finest];
  while (all[all.length - 1].starts.length > 512) {
    const fine = all[all.length - 1];
    const count = Math.ceil(fine.starts.length / 2);
    const coarse = {
      starts: new Float64Array(count), stacks: new Float32Array(count * series),
      lows: new Float32Array(count), totals: new Float64Array(count), reserved: fine.reserved && new Float32Array(count),
    };
    for (let bin = 0; bin < count; bin++) {
      const one = 2 * bin;
      const two = Math.min(one + 1, fine.starts.length - 1);
      const higher = fine.totals[two] > fine.totals[one] ? two : one;
      coarse.starts[bin] = fine.starts[one];
      coarse.totals[bin] = fine.totals[higher];
      if (fine.reserved) coarse.reserved[bin] = Math.max(fine.reserved[one], fine.reserved[two]);
      coarse.lows[bin] = Math.min(fine.lows[one], fine.lows[two]);
      coarse.stacks.set(fine.stacks.subarray(higher * series, (higher + 1) * series), bin * series);
    }
    all.push(coarse);
  }
  return all;
})();

// Returns the last index whose value is not above the given one; the first if all are.
const lastAt = (sorted, value) => {
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
};

// Returns the coarsest level with a few bins per column.
const levelFor = (from, to, columns) => {
  for (let at = levels.length - 1; at > 0; at--) {
    const starts = levels[at].starts;
    if (lastAt(starts, to) - lastAt(starts, from) >= 2 * columns) return levels[at];
  }
  return levels[0];
};

// Start times of the columns of the address map and of the lanes.
const columnStarts = (() => {
  const bins = arrays(data.column_bins);
  return Float64Array.from(bins, (bin) => levels[0].starts[bin] ?? data.span);
})();
