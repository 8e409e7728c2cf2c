// Drawings that are no curves: stacked bars, a time line, parallel coordinates, a network in pieces.
import { bytes, h, moment, number, plural, s, seconds, value } from "./dom.js";

const MEANING = { compute: 2, forward: 2, captured: 2, backward: 5, sync: 4, communication: 4, input: 6, copy: 1, optimizer: 0, save: 3, validation: 1, idle: 7 };

// A bar for every row, split into parts: rows are [name, {part: amount}].
export function bars(label, rows, { format = seconds, names = null } = {}) {
  const parts = names ?? [...new Set(rows.flatMap(([, amounts]) => Object.keys(amounts)))];
  const total = Math.max(1e-12, ...rows.map(([, amounts]) => parts.reduce((sum, part) => sum + (amounts[part] ?? 0), 0)));
  const colour = (part, place) => `s${MEANING[part] ?? place % 8}`;
  const drawn = rows.map(([name, amounts]) => {
    const boxes = parts.map((part, place) => {
      const box = h("i", { class: colour(part, place), title: `${name}, ${part}: ${format(amounts[part] ?? 0)}` });
      box.style.width = `${(100 * (amounts[part] ?? 0)) / total}%`;
      return box;
    });
    return h("div", { class: "bar" }, h("span", {}, name), h("div", {}, boxes));
  });
  const said = rows.map(([name, amounts]) => `${name}: ${parts.filter((part) => amounts[part]).map((part) => `${part} ${format(amounts[part])}`).join(", ")}`).join("; ");
  const key = h("div", { class: "key" }, parts.map((part, place) => h("span", {}, h("i", { class: colour(part, place) }), part)));
  return h("figure", {}, key, h("div", { role: "img", "aria-label": `${label}. ${said}` }, drawn));
}

// Moments on a line: marks are {t, text, kind: "fault" | "good" | "plain"}, ticks are plain times. Places are shares of
// the width, so that it can be read in any window.
export function timeline(label, marks, ticks, from, to) {
  const span = Math.max(1e-6, to - from);
  const at = (t) => `${2 + (96 * (t - from)) / span}%`;
  const drawn = marks.map((mark) => {
    const title = s("title", {}, `${moment(mark.t)} ${mark.text}`);
    if (mark.kind === "fault") return s("svg", { x: at(mark.t), y: 14, overflow: "visible" }, s("path", { d: "M0 -7l7 7l-7 7l-7 -7z", class: "mark fault" }, title));
    return s("circle", { cx: at(mark.t), cy: 26, r: mark.kind === "good" ? 6 : 3.5, class: `mark ${mark.kind}` }, title);
  });
  const faults = marks.filter((mark) => mark.kind === "fault").length;
  const said = `${label}: ${marks.length} events, ${faults} of them faults, ${ticks.length} checkpoints`;
  return h("figure", {}, s("svg", { class: "timeline", role: "img", "aria-label": said },
    s("line", { x1: "2%", x2: "98%", y1: 36, y2: 36, class: "axis" }),
    ticks.map((t) => s("line", { x1: at(t), x2: at(t), y1: 36, y2: 46, class: "tick" }, s("title", {}, `${moment(t)} checkpoint`))),
    drawn,
    s("text", { x: "2%", y: 60, class: "soft" }, moment(from)),
    s("text", { x: "98%", y: 60, class: "soft", "text-anchor": "end" }, `${moment(to)} (${seconds(to - from)})`)));
}

// One line for every trial through an axis for every parameter: axes are {name, log, choices}. It takes all of `room`
// pixels, and more where the axes need it.
export function parallel(label, axes, trials, best, cost, room = 0) {
  const [width, height, top, bottom] = [Math.max(room, 150 * axes.length, 480), 320, 26, 30];
  const x = (place) => 50 + ((width - 110) * place) / Math.max(1, axes.length - 1);
  const scales = axes.map((axis) => scaleOf(axis, trials));
  const y = (place, trial) => top + (height - top - bottom) * (1 - scales[place].place(axes[place].of(trial)));
  const costs = trials.map(cost).filter(Number.isFinite).sort((a, b) => a - b);
  const shade = (trial) => Math.min(7, Math.floor((8 * costs.findIndex((one) => one >= cost(trial))) / Math.max(1, costs.length)));
  const ways = trials.map((trial) => {
    const path = axes.map((_, place) => `${place ? "L" : "M"}${x(place).toFixed(1)} ${y(place, trial).toFixed(1)}`).join("");
    const way = s("path", { d: path, class: `way${trial.number === best ? " best" : ""}`, "data-trial": trial.number }, s("title", {}, `trial ${trial.number}: ${axes.map((axis) => `${axis.name} ${value(axis.of(trial))}`).join(", ")}`));
    way.style.stroke = trial.number === best ? "var(--c1)" : `color-mix(in srgb, var(--c0) ${100 - 10 * Math.max(0, shade(trial))}%, var(--line))`;
    return way;
  });
  const lines = axes.map((_, place) => s("line", { x1: x(place), x2: x(place), y1: top, y2: height - bottom, class: "axis" }));
  const words = axes.flatMap((axis, place) => [
    s("text", { x: x(place), y: 14, "text-anchor": "middle" }, axis.name),
    ...scales[place].ticks.map(([text, part]) => s("text", { x: x(place) + 4, y: top + (height - top - bottom) * (1 - part) + 4, class: "over" }, text)),
  ]);
  return wide(label, s("svg", { width, height, role: "img", "aria-label": `${label}: ${plural(trials.length, "trial")} over ${axes.map((axis) => axis.name).join(", ")}${best === null ? "" : `; the best is trial ${best}`}` }, lines, ways, words));
}

// A drawing of one size: in a narrow window it is moved, by the keyboard too, because smaller it could not be read.
function wide(label, drawing) {
  return h("figure", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, drawing);
}

// Where a value lies on an axis, from 0 to 1, and what is written beside it.
export function scaleOf(axis, trials) {
  if (axis.choices) {
    const last = Math.max(1, axis.choices.length - 1);
    const find = (one) => Math.max(0, axis.choices.findIndex((choice) => String(choice) === String(one)));
    return { place: (one) => find(one) / last, ticks: axis.choices.map((choice, place) => [value(choice).slice(0, 14), place / last]) };
  }
  const values = trials.map(axis.of).filter((one) => typeof one === "number" && Number.isFinite(one));
  const low = axis.low ?? Math.min(...values);
  const high = axis.high ?? Math.max(...values);
  const bend = axis.log ? Math.log : (one) => one;
  const span = bend(high) - bend(low) || 1;
  return { place: (one) => (typeof one === "number" ? Math.min(1, Math.max(0, (bend(one) - bend(low)) / span)) : 0), ticks: values.length || axis.low !== undefined ? [[number(high, 3), 1], [number(low, 3), 0]] : [] };
}

// A partitioned network: a row for every device, pieces in the order in which they run, arrows for what crosses.
export function pieces(partition, name) {
  const [width, height, gap] = [200, 66, 40];
  const ranks = [...new Set(partition.boxes.map((box) => box.rank))].sort((a, b) => a - b);
  const ends = new Map();
  const spots = partition.boxes.map((box, place) => {
    const x = Math.max(110 + place * (width / 2 + gap), (ends.get(box.rank) ?? 0) + gap / 2);
    ends.set(box.rank, x + width);
    return [x, 16 + ranks.indexOf(box.rank) * (height + gap)];
  });
  const all = [Math.max(...spots.map(([x]) => x)) + width + 20, 16 + ranks.length * (height + gap)];
  const arrows = partition.arrows.map((arrow) => {
    const [[x1, y1], [x2, y2]] = [spots[arrow.source], spots[arrow.to]];
    const down = y2 > y1;
    const [fromY, toY] = [y1 + (down ? height : 0), y2 + (down ? 0 : height)];
    const [fromX, toX] = [x1 + width * 0.6, x2 + width * 0.3];
    return [
      s("path", { class: "edge", "marker-end": "url(#tip)", d: `M${fromX} ${fromY}C${fromX} ${(fromY + toY) / 2} ${toX} ${(fromY + toY) / 2} ${toX} ${toY}` }),
      s("text", { x: (fromX + toX) / 2, y: (fromY + toY) / 2 + 4, class: "over", "text-anchor": "middle" }, bytes(arrow.num_bytes)),
    ];
  });
  const boxes = partition.boxes.map((box, place) => {
    const [x, y] = spots[place];
    const names = box.parts.length > 3 ? `${box.parts.slice(0, 2).join(", ")} … ${box.parts.at(-1)}` : box.parts.join(", ") || "between modules";
    const lines = [names, plural(box.num_operations, "operation"), `${plural(box.num_parameters, "parameter")}${box.seconds ? `, ${seconds(box.seconds)}` : ""}`];
    return s("g", {}, s("title", {}, box.parts.join(", ")), s("rect", { x, y, width, height, rx: 6, class: "box" }), lines.map((text, line) => s("text", { x: x + 8, y: y + 18 + 19 * line, class: line ? "soft" : null }, text.slice(0, 32))));
  });
  const named = ranks.map((rank, row) => s("text", { x: 4, y: 16 + row * (height + gap) + height / 2 }, partition.boxes.find((box) => box.rank === rank).device.slice(0, 16)));
  const said = partition.boxes.map((box) => `${box.parts.join(", ") || "between modules"} on ${box.device}`).join("; ");
  const tip = s("defs", {}, s("marker", { id: "tip", markerWidth: 8, markerHeight: 8, refX: 7, refY: 3, orient: "auto" }, s("path", { d: "M0,0 L7,3 L0,6 z", class: "tip" })));
  return wide(`Partition of the network of ${name}`, s("svg", { width: all[0], height: all[1], role: "img", "aria-label": `Partition of the network: ${said}` }, tip, boxes, arrows, named));
}

// A small curve beside its last value, which says the same in words.
export function sparkline(values) {
  const [width, height] = [90, 22];
  const found = values.filter(Number.isFinite);
  if (found.length < 2) return "";
  const [low, high] = [Math.min(...found), Math.max(...found)];
  const x = (place) => (1 + ((width - 2) * place) / (found.length - 1)).toFixed(1);
  const y = (one) => (2 + ((height - 4) * (high - one)) / (high - low || 1)).toFixed(1);
  return s("svg", { class: "spark", width, height, "aria-hidden": "true" }, s("polyline", { points: found.map((one, place) => `${x(place)},${y(one)}`).join(" ") }));
}
