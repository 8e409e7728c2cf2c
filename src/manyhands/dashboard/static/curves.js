// Computations on curves, {x, mean, low?, high?}: smoothing, the x axis, and whether a logarithmic scale makes sense.

// Exponential moving average, corrected for its start, as in TensorBoard; gaps stay gaps.
export function smoothed(values, weight) {
  let last = 0;
  let num = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    last = weight * last + (1 - weight) * value;
    num += 1;
    return last / (1 - weight ** num);
  });
}

// A function from steps to what points {x, y} say, linear between them, and beyond the last one with its slope.
export function along({ x, y }) {
  if (!x.length) return null;
  const [xs, ys] = x[0] > 0 ? [[0, ...x], [0, ...y]] : [x, y];
  let at = 0;
  return (step) => {
    if (xs[at] > step) at = 0;
    while (at < xs.length - 2 && xs[at + 1] < step) at += 1;
    const next = Math.min(at + 1, xs.length - 1);
    const slope = xs[next] > xs[at] ? (ys[next] - ys[at]) / (xs[next] - xs[at]) : 0;
    return ys[at] + slope * (step - xs[at]);
  };
}

// Whether all values are positive and span more than a decade, so that a logarithmic scale shows more than a linear one.
export function spansDecades(curves) {
  let [low, high] = [Infinity, 0];
  for (const curve of Object.values(curves)) {
    for (const value of curve.mean) {
      if (value === null || value === undefined) continue;
      if (value <= 0) return false;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return high > 10 * low;
}

const KINDS = [
  ["Validation loss", /loss|nll|entropy|perplexity|mse|mae|rmse/i],
  ["Accuracy", /acc|precision|recall|f1|auc|iou|dice|bleu|rouge/i],
];

// Metrics by the chart that they belong to, because losses and accuracies have different scales.
export function byKind(metrics) {
  const found = Object.fromEntries([...KINDS.map(([title]) => [title, {}]), ["Metrics", {}]]);
  for (const [name, curve] of Object.entries(metrics)) {
    const [title] = KINDS.find(([, pattern]) => pattern.test(name)) ?? ["Metrics"];
    found[title][name] = curve;
  }
  return found;
}

// A chart for each logged name, and one for all that are too many.
export function byName(curves, most = 40) {
  const found = {};
  for (const [place, [name, curve]] of Object.entries(curves).entries()) {
    const title = place < most ? `Logged: ${name}` : "Logged: others";
    found[title] = { ...found[title], [name]: curve };
  }
  return found;
}
