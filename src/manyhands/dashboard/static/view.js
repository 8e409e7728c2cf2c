// How the curves of a page are shown: smoothing, and steps, epochs or time along x. The choice is kept for next time.
import { along, smoothed } from "./curves.js";
import { h, seconds } from "./dom.js";

const AXES = { step: { x: "step" }, epoch: { x: "epoch" }, time: { x: "time since the start", xFormat: seconds } };
const CLOCKS = { epoch: "epochs", time: "seconds" };
const MOST = 0.99;
// Curves with fewer points, such as one per epoch, are not smoothed: an average would only be late.
const LEAST_POINTS = 25;

export class CurveView {
  constructor(onchange) {
    const weight = Number(localStorage.getItem("smoothing"));
    const axis = localStorage.getItem("axis");
    this.weight = weight > 0 && weight <= MOST ? weight : 0;
    this.axis = Object.hasOwn(AXES, axis) ? axis : "step";
    this.maps = new Map();
    const said = h("output", {}, String(this.weight));
    const slider = h("input", { type: "range", id: "smoothing", min: 0, max: MOST, step: 0.01, value: this.weight, oninput: () => {
      this.weight = Number(slider.value);
      said.textContent = String(this.weight);
      localStorage.setItem("smoothing", this.weight);
      onchange();
    } });
    const select = h("select", { id: "axis", onchange: () => {
      this.axis = select.value;
      localStorage.setItem("axis", this.axis);
      onchange();
    } }, Object.keys(AXES).map((name) => h("option", { value: name, selected: name === this.axis }, name === "time" ? "relative time" : name)));
    this.note = h("span", { class: "soft", role: "status" });
    this.node = h("div", { class: "tools" }, h("span", { class: "pair" }, h("label", { for: "smoothing" }, "Smoothing"), slider, said), h("span", { class: "pair" }, h("label", { for: "axis" }, "x axis"), select), this.note);
  }

  // The clocks of the runs that are shown, by id: an axis that one of them does not have is not used for any.
  use(clocks) {
    const found = Object.entries(clocks).map(([id, clock]) => [id, this.axis === "step" ? (step) => step : along(clock[CLOCKS[this.axis]])]);
    this.shown = found.every(([, map]) => map) ? this.axis : "step";
    this.maps = new Map(this.shown === this.axis ? found : found.map(([id]) => [id, (step) => step]));
    this.note.textContent = this.shown === this.axis ? "" : `The ${this.axis} of steps is not known yet.`;
  }

  // A chart's options with the curves as they are to be drawn; `of` is the id of the run of a curve.
  chart(curves, { gaps = {}, of = () => "run" } = {}) {
    const drawn = Object.entries(curves).map(([name, curve]) => [name, this.#drawn(curve, this.maps.get(of(name)))]);
    const marks = Object.entries(gaps).map(([name, steps]) => [name, steps.map(this.maps.get(of(name)))]);
    return { curves: Object.fromEntries(drawn), gaps: Object.fromEntries(marks), xFormat: null, ...AXES[this.shown] };
  }

  #drawn({ x, mean, low, high }, map) {
    const moved = this.shown === "step" ? x : x.map(map);
    if (!this.weight || x.length < LEAST_POINTS) return low ? { x: moved, mean, low, high } : { x: moved, mean };
    return { x: moved, mean: smoothed(mean, this.weight), raw: mean };
  }
}
