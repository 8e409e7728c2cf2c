// Files that a reader keeps: the numbers of a chart as CSV, and its picture as PNG.
import { h } from "./dom.js";

// A cell of a table of commas. Text that a spreadsheet would compute is marked as text by an apostrophe.
export function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^\s*[=+\-@]/.test(value) || /^[\t\r]/.test(value) ? `'${value}` : String(value);
  return `"${text.replaceAll('"', '""')}"`;
}

export function csv(x, curves) {
  const columns = Object.entries(curves).flatMap(([name, curve]) => ["mean", "raw", "low", "high"].filter((what) => curve[what]).map((what) => ({ title: what === "mean" ? name : `${name} (${what})`, table: [curve.x, curve[what]] })));
  const [xs = [], ...values] = columns.length ? uPlot.join(columns.map((one) => one.table)) : [];
  const rows = Array.from(xs, (one, place) => [one, ...values.map((column) => column[place])]);
  return [[x, ...columns.map((one) => one.title)], ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

// The canvas of a chart with its title above and its curves' names below, on the colours of the page.
export function picture({ title, plot, names, colours, ink, ground }) {
  const scale = devicePixelRatio || 1;
  const source = plot.ctx.canvas;
  const pad = 12 * scale;
  const row = 18 * scale;
  const canvas = document.createElement("canvas");
  const pen = canvas.getContext("2d");
  const font = `${12 * scale}px system-ui, sans-serif`;
  pen.font = font;
  const places = [];
  let [x, y] = [pad, 0];
  for (const name of names) {
    const width = pen.measureText(name).width + 28 * scale;
    if (x > pad && x + width > source.width) [x, y] = [pad, y + row];
    places.push([x, y]);
    x += width;
  }
  canvas.width = source.width + 2 * pad;
  const top = pad + 1.4 * row;
  canvas.height = top + source.height + y + row + pad;
  pen.fillStyle = ground;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(source, pad, top);
  pen.fillStyle = ink;
  pen.font = `600 ${13 * scale}px system-ui, sans-serif`;
  pen.fillText(title, pad, pad + row / 2);
  pen.font = font;
  places.forEach(([left, down], place) => {
    const at = top + source.height + down + row / 2;
    pen.fillStyle = colours[place];
    pen.fillRect(left, at - 9 * scale, 10 * scale, 10 * scale);
    pen.fillStyle = ink;
    pen.fillText(names[place], left + 15 * scale, at);
  });
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}

export function save(name, ending, blob) {
  const url = URL.createObjectURL(blob);
  const file = `${name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 100) || "chart"}.${ending}`;
  h("a", { href: url, download: file }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
