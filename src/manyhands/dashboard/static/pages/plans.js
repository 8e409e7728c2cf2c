// Plans: speed against devices, with what was measured on the curve, and every way of splitting.
import { Chart } from "../charts.js";
import { bytes, empty, facts, fill, get, h, link, moment, number, plural, seconds, table, unseen } from "../dom.js";

export const title = "Plans";

export function open(host, [from]) {
  let chosen = null;
  const pick = h("div", { class: "tools" });
  const head = h("div");
  const chart = new Chart("Speed-up against devices", { x: "devices", doublings: true, height: 320 });
  const below = h("div");
  const body = h("div", { hidden: true }, head, unseen("Speed-up"), chart.node, below);
  host.append(h("h1", {}, title), pick, body);

  async function update() {
    const plans = await get("plans");
    if (!plans.length) {
      fill(pick, empty("No plans yet. ", h("code", {}, "manyhands plan FILE.py --log plans/first"), " keeps one, and so does a run with the strategy auto."));
      return;
    }
    body.hidden = false;
    const key = (plan) => `${plan.from} ${plan.t}`;
    const plan = plans.find((one) => key(one) === chosen) ?? plans.find((one) => one.from === from) ?? plans[0];
    chosen = key(plan);
    const select = h("select", { "aria-label": "Which plan", "data-key": "plan", onchange: (event) => { chosen = event.target.value; update(); } }, plans.map((one) => h("option", { value: key(one), selected: one === plan }, `${one.task} on ${one.cluster}, ${moment(one.t)} (${one.from})`)));
    if (!pick.contains(document.activeElement)) fill(pick, select);
    fill(head, facts([["task", plan.task], ["cluster", plan.cluster], ["batch", number(plan.batch_size)], ["pick", plan.best], ["saturates at", plural(plan.curve.saturates, "device")], ["because of", plan.curve.reason], ["times may be off by", `${Math.round(100 * plan.band)}%`], ["a million samples take", spent(plan)]]), plan.notes.map((note) => h("p", { class: "soft" }, note)));
    chart.update(curves(plan));
    fill(below, compared(plan, plans), measured(plan), batches(plan), remedies(plan), h("h2", {}, "Strategies"), options(plan));
  }

  return { title, update };
}

function curves(plan) {
  const { devices, speedup } = plan.curve;
  const dots = (points) => {
    const best = new Map();
    for (const one of points) if (!(best.get(one.devices)?.speedup >= one.speedup)) best.set(one.devices, one);
    const sorted = [...best.values()].sort((a, b) => a.devices - b.devices);
    return { x: sorted.map((one) => one.devices), mean: sorted.map((one) => one.speedup), points: true };
  };
  const at = devices.reduce((best, count, place) => (Math.abs(Math.log(count / plan.curve.saturates)) < Math.abs(Math.log(devices[best] / plan.curve.saturates)) ? place : best), 0);
  const found = { predicted: { x: devices, mean: speedup }, perfect: { x: devices, mean: devices, dash: true }, saturation: { x: [plan.curve.saturates], mean: [speedup[at]], points: true, ring: true } };
  const [tried, runs] = [plan.points.filter((one) => one.what.startsWith("tried")), plan.points.filter((one) => !one.what.startsWith("tried"))];
  if (tried.length) found["measured by the planner"] = dots(tried);
  if (runs.length) found["measured by runs"] = dots(runs);
  return found;
}

function measured(plan) {
  if (!plan.points.length) return null;
  const name = (point) => (point.what.startsWith("run ") ? link("run", point.what.slice(4), point.what) : point.what);
  return [h("h2", {}, "Measured"), table("Measured", [["devices", (one) => number(one.devices), { num: true }], ["speed-up over one", (one) => number(one.speedup, 3), { num: true }], ["by", name]], plan.points)];
}

const hours = (value) => (value == null ? "–" : value < 1 ? `${number(60 * value, 3)} min` : `${number(value, 3)} h`);
const money = (value, plan) => (value == null ? "–" : `${plan.currency ?? ""}${number(value, 3)}`);
const energy = (value) => (value == null ? "–" : `${number(value, 3)} kWh`);
const spent = (plan) => [hours(plan.hours_per_million_samples), money(plan.cost_per_million_samples, plan), energy(plan.energy_per_million_samples)].filter((text) => text !== "–").join(", ") || "–";

function compared(plan, plans) {
  const same = plan.compared ? plans.filter((one) => one.compared === plan.compared && one.from === plan.from) : [];
  if (same.length < 2) return null;
  same.sort((a, b) => a.hours_per_million_samples - b.hours_per_million_samples);
  const columns = [
    ["cluster", (one) => one.cluster, { wide: true }],
    ["devices", (one) => number(one.devices), { num: true }],
    ["strategy", (one) => one.best],
    ["samples/s", (one) => number(one.samples_per_second, 3), { num: true }],
    ["time", (one) => hours(one.hours_per_million_samples), { num: true }],
    ["price", (one) => money(one.cost_per_million_samples, one), { num: true }],
    ["energy", (one) => energy(one.energy_per_million_samples), { num: true }],
    ["error", (one) => `±${Math.round(100 * one.error)}%`, { num: true }],
    ["evidence", (one) => one.evidence],
  ];
  return [h("h2", {}, "Clusters side by side"), h("p", { class: "soft" }, "Time, price and energy of a million samples; energy at the thermal design power of the devices."), table("Clusters side by side", columns, same, { row: (one) => ({ class: one === plan ? "chosen" : null }) })];
}

function batches(plan) {
  if (!plan.batches?.length) return null;
  const columns = [
    ["batch", (one) => number(one.batch_size), { num: true }],
    ["devices", (one) => number(one.num_devices), { num: true }],
    ["step", (one) => seconds(one.seconds), { num: true }],
    ["steps", (one) => number(one.steps, 3), { num: true }],
    ["time", (one) => hours(one.hours), { num: true }],
    ["price", (one) => money(one.cost, plan), { num: true }],
    ["energy", (one) => energy(one.energy), { num: true }],
    ["efficiency", (one) => `${Math.round(100 * one.efficiency)}%`, { num: true }],
  ];
  return [h("h2", {}, "To a target loss"), h("p", { class: "soft" }, "To the loss that a million samples reach with the task's batch size."), table("To a target loss", columns, plan.batches)];
}

function remedies(plan) {
  const found = plan.curve.remedies;
  if (!found.length) return null;
  return [h("h2", {}, "What would improve scaling"), table("Remedies", [["what", (one) => one.text, { wide: true }], ["speed here", (one) => `${number(one.gain, 3)}×`, { num: true }], ["saturates at", (one) => number(one.saturates), { num: true }], ["note", (one) => (one.is_lossy ? "changes the mathematics" : "")]], found)];
}

function options(plan) {
  const columns = [
    ["strategy", (one) => one.strategy],
    ["devices", (one) => number(one.devices), { num: true }],
    ["step", (one) => seconds(one.seconds), { num: true }],
    ["measured", (one) => (one.measured ? seconds(one.measured) : "–"), { num: true }],
    ["memory", (one) => bytes(one.memory), { num: true }],
    ["samples/s", (one) => number(one.samples_per_second, 3), { num: true }],
    ["efficiency", (one) => `${Math.round(100 * one.efficiency)}%`, { num: true }],
    ["price per 1M", (one) => money(one.cost_per_million_samples, plan), { num: true }],
    ["energy per 1M", (one) => energy(one.energy_per_million_samples), { num: true }],
    ["note", (one) => (one.fits ? one.refused : "does not fit"), { wide: true }],
  ];
  return table("Strategies", columns, plan.options.slice(0, 40), { row: (one) => ({ class: one.strategy === plan.best ? "chosen" : null }) });
}
