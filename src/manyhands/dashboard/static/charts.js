// Charts on a canvas (uPlot), with a legend that the keyboard reaches, and the numbers as a table for who cannot see them.
import { spansDecades } from "./curves.js";
import { byteRate, bytes, fill, h, moment, number, plural, seconds } from "./dom.js";
import { csv, picture, save } from "./download.js";

const COLOURS = 8;
const HEIGHT = 220;
const live = new Set();
const DOUBLES = Array.from({ length: 60 }, (_, power) => 2 ** power);
const WHOLE = Array.from({ length: 40 }, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3));
const SPANS = [1e-3, 1e-2, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A chart of curves by name: {x: [...], mean: [...], low?, high?, raw?}; `points` draws dots without lines, `ring` rings
// that go around them. Where x has no numbers, `names` are what its places are called. `gaps` are the x at which a curve
// was not finite.
export class Chart {
  constructor(title, { x = "step", xFormat = null, time = false, format = number, log = false, logX = false, doublings = false, names = null, height = HEIGHT } = {}) {
    Object.assign(this, { title, x, xFormat, time, format, log, logX, doublings, names, height, gaps: {} });
    this.curves = {};
    this.columns = [null];
    this.hidden = new Set();
    this.zoomed = false;
    this.canvas = h("div");
    this.legend = h("ul", { class: "legend" });
    this.broken = h("p", { class: "fault", hidden: true });
    this.numbers = h("details", {}, h("summary", {}, "Numbers"));
    this.numbers.addEventListener("toggle", () => this.#tabulate());
    this.figure = h("figure", { class: "chart", role: "group", tabindex: "0", "aria-label": title, onkeydown: (event) => this.#key(event) }, this.canvas);
    this.scale = h("button", { type: "button", hidden: true, "aria-pressed": String(log), "aria-label": `Logarithmic scale of ${title}`, onclick: () => this.#toggle() }, "log");
    const saving = [["CSV", () => this.#saveNumbers()], ["PNG", () => this.#savePicture()]].map(([what, onclick]) => h("button", { type: "button", "aria-label": `Download ${title} as ${what}`, onclick }, what));
    this.node = h("section", { class: "card" }, h("div", { class: "tools" }, h("h3", {}, title), this.scale, h("span", { class: "saving" }, saving)), this.figure, this.legend, this.broken, this.numbers);
    this.canvas.addEventListener("dblclick", () => { this.zoomed = false; });
    new ResizeObserver(() => this.#resize()).observe(this.canvas);
    live.add(this);
  }

  update(curves, { x = this.x, xFormat = this.xFormat, gaps = {} } = {}) {
    const shape = (found) => Object.entries(found).map(([name, curve]) => [name, "low" in curve, "raw" in curve].join()).join("\n");
    const logs = !this.doublings && spansDecades(curves);
    const same = this.plot && shape(curves) === shape(this.curves) && x === this.x && !(this.log && !logs);
    if (x !== this.x) this.zoomed = false;
    Object.assign(this, { curves, x, xFormat, gaps, log: this.log && logs });
    this.scale.hidden = !logs;
    this.scale.setAttribute("aria-pressed", String(this.log));
    if (!same) this.draw();
    else this.plot.setData(this.#data(), !this.zoomed);
    this.#describe();
    this.#values(null);
    this.#tabulate();
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    const names = Object.keys(this.curves);
    if (!this.canvas.isConnected && !this.canvas.clientWidth) queueMicrotask(() => this.#resize());
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
    const scale = this.doublings ? { distr: 3, log: 2 } : { distr: this.log ? 3 : 1 };
    const series = [{}];
    const bands = [];
    this.columns = [null];
    const add = (name, one) => {
      this.columns.push(name);
      return series.push({ label: name, spanGaps: true, show: !this.hidden.has(name), points: { show: false }, ...one }) - 1;
    };
    names.forEach((name, place) => {
      const colour = css(`--c${place % COLOURS}`);
      const curve = this.curves[name];
      const dots = curve.points === true;
      const dot = curve.ring ? { show: true, size: 15, width: 2.5, fill: "transparent" } : { show: true, size: 8, fill: colour };
      add(name, { stroke: colour, width: dots ? 0 : 1.75, dash: curve.dash ? [5, 4] : undefined, spanGaps: !dots, paths: dots ? () => null : undefined, points: dots ? dot : { show: () => this.curves[name].x.length < 40, size: 5 } });
      if (curve.raw) add(name, { stroke: `${colour}55`, width: 1 });
      if (curve.low) {
        const at = add(name, { stroke: "transparent", width: 0 });
        bands.push({ series: [at, add(name, { stroke: "transparent", width: 0 })], fill: `${colour}33` });
      }
    });
    this.plot = new uPlot(
      {
        width: this.canvas.clientWidth || 480, height: this.height, series, bands,
        scales: { x: this.doublings ? { time: false, distr: 3, log: 2 } : { time: this.time, distr: this.logX ? 3 : 1, range: (_, low, high) => this.#range(low, high) }, y: scale },
        axes: [{ ...axis, label: this.time ? undefined : this.x, labelSize: 16, size: 30, labelFont: axis.font, ...this.#steps() }, { ...axis, size: (_, words) => 16 + 6.5 * Math.max(4, ...(words ?? []).map((one) => one.length)), incrs: [bytes, byteRate].includes(this.format) ? DOUBLES : undefined, values: (_, splits) => told(splits, this.format) }],
        legend: { show: false }, cursor: { points: { size: 6 }, drag: { x: true, y: false } },
        hooks: { draw: [(plot) => this.#mark(plot)], setCursor: [(plot) => this.#values(plot.cursor.idx)], setSelect: [(plot) => { if (plot.select.width > 0) this.zoomed = true; }] },
      },
      this.#data(), this.canvas,
    );
    this.node.plot = this.plot;
    fill(this.legend, names.map((name, place) => {
      const button = h("button", { type: "button", "data-key": name, "aria-pressed": String(!this.hidden.has(name)), onclick: () => this.#hide(name, button) }, h("i", { class: `s${place % COLOURS}` }), h("span", {}, name), h("output", { class: "soft" }));
      return h("li", {}, button);
    }));
  }

  // Columns as uPlot wants them: one x for all, gaps where a curve has no point.
  #data() {
    const positive = (column) => (this.log || this.doublings ? column.map((v) => (v > 0 ? v : null)) : column);
    const tables = Object.values(this.curves).map((curve) => [curve.x, positive(curve.mean), ...(curve.raw ? [positive(curve.raw)] : []), ...(curve.low ? [positive(curve.high), positive(curve.low)] : [])]);
    return tables.length ? uPlot.join(tables) : [[]];
  }

  // What is written along x.
  #steps() {
    if (this.names) return { splits: () => this.names.map((_, place) => place), values: () => this.names };
    if (this.xFormat === seconds) return { incrs: SPANS, values: (_, splits) => told(splits, seconds) };
    return this.time ? {} : { incrs: ["step", "trial"].includes(this.x) ? WHOLE : undefined, values: (_, splits) => told(splits, short) };
  }

  // Dots at the edge of a chart would be cut, and a single moment has no width.
  #range(low, high) {
    if (this.names) return [-0.5, this.names.length - 0.5];
    if (!this.zoomed) [low, high] = [low, high].map((one, end) => (end ? Math.max : Math.min)(one ?? 0, ...Object.values(this.gaps).flat()));
    if (!Object.values(this.curves).some((curve) => curve.points)) return low === high ? [low - 1, high + 1] : [low, high];
    const ratio = high / low > 1 ? high / low : 2;
    if (this.logX) return [rounded(low / ratio ** 0.04), high * ratio ** 0.04];
    const room = 0.04 * (high - low || Math.abs(high) || 1);
    return [low - room, high + room];
  }

  #hide(name, button) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    const shown = !this.hidden.has(name);
    button.setAttribute("aria-pressed", String(shown));
    this.columns.forEach((one, place) => { if (one === name) this.plot.setSeries(place, { show: shown }); });
  }

  #toggle() {
    this.log = !this.log;
    this.scale.setAttribute("aria-pressed", String(this.log));
    this.draw();
    this.#values(null);
  }

  // A dashed line with a cross where a curve was not finite.
  #mark(plot) {
    const { ctx, bbox } = plot;
    const unit = devicePixelRatio || 1;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = css("--bad");
    ctx.lineWidth = unit;
    ctx.setLineDash([4 * unit, 4 * unit]);
    ctx.font = `${14 * unit}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    for (const x of Object.values(this.gaps).flat()) {
      const left = Math.round(plot.valToPos(x, "x", true));
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText("×", left, bbox.top + 12 * unit);
    }
    ctx.restore();
  }

  #saveNumbers() {
    save(`${document.title} ${this.title}`, "csv", new Blob([csv(this.x, this.curves)], { type: "text/csv" }));
  }

  async #savePicture() {
    const names = Object.keys(this.curves).filter((name) => !this.hidden.has(name));
    const colours = Object.keys(this.curves).map((_, place) => css(`--c${place % COLOURS}`)).filter((_, place) => !this.hidden.has(Object.keys(this.curves)[place]));
    save(`${document.title} ${this.title}`, "png", await picture({ title: this.title, plot: this.plot, names, colours, ink: css("--ink"), ground: css("--raised") }));
  }

  // The values at the cursor, or the last ones; of dots there is no last one.
  #values(place) {
    const outputs = this.legend.querySelectorAll("output");
    Object.values(this.curves).forEach((curve, at) => {
      let shown = curve.points ? -1 : curve.mean.findLastIndex((one) => one !== null);
      if (place !== null && place !== undefined && this.plot) shown = nearest(curve.x, this.plot.data[0][place]);
      if (outputs[at]) outputs[at].textContent = shown >= 0 && curve.mean[shown] !== null ? this.format(curve.mean[shown]) : "";
    });
    if (place !== null && place !== undefined) this.at = place;
  }

  #describe() {
    const parts = Object.entries(this.curves).slice(0, 8).map(([name, curve]) => `${name} ${curve.points ? plural(curve.mean.filter((one) => one !== null).length, "point") : this.format(curve.mean.findLast((one) => one !== null))}`);
    const gaps = Object.entries(this.gaps).filter(([, at]) => at.length).map(([name, at]) => `${name} is not finite at ${this.x} ${this.#told(at[0])}${at.length > 1 ? ` and ${at.length - 1} more` : ""}`);
    this.figure.setAttribute("aria-label", `${this.title}: ${[...parts, ...gaps].join(", ") || "nothing yet"}`);
    this.broken.hidden = !gaps.length;
    this.broken.textContent = gaps.join("; ");
  }

  // A place along x in words.
  #told(x) {
    return this.names?.[x] ?? (this.time ? moment(x) : (this.xFormat ?? number)(x, 8));
  }

  #tabulate() {
    if (!this.numbers.open) return;
    const rows = [];
    for (const [name, curve] of Object.entries(this.curves)) {
      const every = Math.max(1, Math.ceil(curve.x.length / 50));
      for (let place = curve.x.length - 1; place >= 0; place -= every) if (curve.mean[place] !== null) rows.push([name, curve.x[place], curve.mean[place]]);
    }
    const head = h("tr", {}, ["curve", this.time ? "when" : this.x, "value"].map((text) => h("th", { scope: "col" }, text)));
    const body = rows.map((row) => h("tr", {}, h("td", {}, row[0]), h("td", { class: "num" }, this.#told(row[1])), h("td", { class: "num" }, this.format(row[2], 6))));
    fill(this.numbers, h("summary", { "data-key": "numbers" }, "Numbers"), h("div", { class: "scroll", role: "region", "aria-label": `Numbers of ${this.title}`, tabindex: "0" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body))));
  }

  #key(event) {
    if (!this.plot || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const last = this.plot.data[0].length - 1;
    if (event.key === "Escape") {
      this.zoomed = false;
      this.plot.setData(this.plot.data, true);
      return;
    }
    const step = Math.max(1, Math.round(last / 100)) * (event.key === "ArrowLeft" ? -1 : 1);
    const at = event.key === "Home" ? 0 : event.key === "End" ? last : Math.min(last, Math.max(0, (this.at ?? last) + step));
    this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][at], "x"), top: 10 });
    this.#values(at);
  }

  #resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }
}

// Numbers beside an axis, with as many digits as it takes to tell them apart.
function told(splits, format) {
  for (let digits = 3; ; digits++) {
    const words = splits.map((one) => (one === null ? "" : format(one, digits)));
    const written = words.filter(Boolean);
    if (digits === 8 || new Set(written).size === written.length) return words;
  }
}

// The next number below that has one digit.
function rounded(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return Math.floor(value / unit) * unit;
}

function short(value, digits) {
  return Math.abs(value) < 1e5 ? number(value, digits) : value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: digits });
}

function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle - 1;
  }
  return low + 1 < xs.length && Math.abs(xs[low + 1] - x) < Math.abs(xs[low] - x) ? low + 1 : low;
}

// Colours are read when a chart is drawn.
export function redraw() {
  for (const chart of live) {
    if (chart.node.isConnected && chart.plot) {
      chart.draw();
      chart.update(chart.curves, { gaps: chart.gaps });
    }
  }
}

export function forget() {
  for (const chart of live) chart.plot?.destroy();
  live.clear();
}

// Charts that come with the groups of curves that there are, {title: curves}, and stand in their order.
export class Charts {
  constructor(host) {
    this.host = host;
    this.charts = new Map();
  }

  update(groups) {
    let before = null;
    for (const [title, { curves, ...options }] of Object.entries(groups)) {
      const has = Object.keys(curves).length > 0;
      let chart = this.charts.get(title);
      if (!has && !chart) continue;
      if (!chart) {
        chart = new Chart(title, options);
        this.charts.set(title, chart);
        this.host.insertBefore(chart.node, before ? before.nextSibling : this.host.firstChild);
      }
      before = chart.node;
      chart.update(curves, { x: options.x, xFormat: options.xFormat, gaps: options.gaps });
    }
  }
}
