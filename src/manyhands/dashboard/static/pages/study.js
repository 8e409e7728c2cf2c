// One study: its course, parallel coordinates, slices, curves of its trials, and the trials.
import { Charts } from "../charts.js";
import { empty, facts, fill, get, h, link, number, seconds, state, table, value } from "../dom.js";
import { parallel } from "../drawings.js";

export const title = "Study";
const [MOST_ROWS, MOST_CURVES, MOST_WAYS] = [200, 20, 500];

export function open(host, [id], store) {
  let sort = ["number", 1];
  let study = null;
  const head = h("div");
  const grid = h("div", { class: "grid" });
  const charts = new Charts(grid);
  const ways = h("section", { "aria-label": "Parallel coordinates" });
  const slices = h("div", { class: "grid" });
  const sliceCharts = new Charts(slices);
  const trials = h("section", { "aria-label": "Trials" });
  host.append(head, grid, ways, h("h2", {}, "Slices"), slices, trials);

  async function update() {
    study = await get("study", { id });
    if (!study) {
      fill(head, empty(`There is no study ${id}.`));
      return;
    }
    const [[name = "value", mode = "min"] = []] = study.objectives;
    const sign = mode === "max" ? -1 : 1;
    const done = study.trials.filter((trial) => Number.isFinite(reached(trial)));
    const finished = done.filter((trial) => trial.state === "finished");
    fill(head, h("h1", {}, study.id, study.counts.running ? state("running") : null), facts([
      ["objective", study.objectives.map(([one, how]) => `${one} (${how})`).join(", ")],
      ["trials", number(study.num_trials)],
      ...Object.entries(study.counts).map(([one, count]) => [one, number(count)]),
      ["best", study.best ? number(study.best.values[0]) : null],
      ["best trial", study.best ? `${study.best.number}: ${Object.entries(study.best.params).map(([key, one]) => `${key} ${value(one)}`).join(", ")}` : null],
      ["search", study.search], ["stops", study.stop], ["epochs", value(study.about.epochs)],
    ]));
    charts.update({ Course: { curves: course(finished, name, sign), x: "trial" }, "Trials by epoch": { curves: reports(study.trials, sign), x: "epoch" } });
    drawWays(done, name, sign);
    sliceCharts.update(Object.fromEntries(numeric(study).map((param) => [`${name} by ${param}`, { curves: scatters(done, name, param), x: param, logX: Boolean(study.ranges[param].attributes.log) }])));
    list(name);
  }

  function drawWays(done, name, sign) {
    const axes = [...Object.entries(study.ranges).map(([param, range]) => ({ name: param, of: (trial) => trial.params[param], log: range.attributes.log, low: range.attributes.low, high: range.attributes.high, choices: range.attributes.choices })), { name, of: reached }];
    const shown = done.slice(-MOST_WAYS);
    fill(ways, h("h2", {}, "Parallel coordinates"), shown.length ? h("div", { class: "card" }, parallel("Parallel coordinates", axes, shown, study.best?.number ?? null, (trial) => sign * reached(trial))) : h("p", { class: "soft" }, "No trial has come to its end yet."));
  }

  function list(name) {
    const params = Object.keys(study.ranges);
    const of = { number: (trial) => trial.number, state: (trial) => trial.state, value: (trial) => reached(trial) ?? null, seconds: (trial) => trial.seconds, ...Object.fromEntries(params.map((one) => [`params ${one}`, (trial) => trial.params[one]])) };
    const sorted = [...study.trials].sort((a, b) => {
      const [x, y] = [of[sort[0]](a), of[sort[0]](b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return sort[1] * (x < y ? -1 : x > y ? 1 : 0);
    });
    const columns = [
      ["trial", (trial) => run(trial), { key: "number", num: true }],
      ["state", (trial) => state(trial.state), { key: "state" }],
      [name, (trial) => number(reached(trial)), { key: "value", num: true }],
      ...params.map((one) => [one, (trial) => value(trial.params[one]), { key: `params ${one}`, num: true }]),
      ["epochs", (trial) => number(Math.max(0, ...trial.reports.map(([epoch]) => epoch))), { num: true }],
      ["time", (trial) => seconds(trial.seconds), { key: "seconds", num: true }],
      ["worker", (trial) => value(trial.worker), { num: true }],
      ["why", (trial) => trial.reason, { wide: true }],
    ];
    const onsort = (key) => {
      sort = [key, sort[0] === key ? -sort[1] : 1];
      list(name);
    };
    fill(trials, h("h2", {}, "Trials"), table("Trials", columns, sorted.slice(0, MOST_ROWS), { sort, onsort, row: (trial) => ({ class: trial.number === study.best?.number ? "chosen" : null }) }), sorted.length > MOST_ROWS ? h("p", { class: "soft" }, `${MOST_ROWS} of ${study.num_trials} are shown.`) : null);
  }

  function run(trial) {
    const inner = `${study.id}/trials/${String(trial.number).padStart(5, "0")}`;
    return store.run.has(inner) ? link("run", inner, String(trial.number)) : String(trial.number);
  }

  return { title: id ?? title, update };
}

// What a trial has come to: its value, or that of its last report where it was stopped before its end.
function reached(trial) {
  return trial.values[0] ?? trial.reports.at(-1)?.[1];
}

function course(finished, name, sign) {
  if (!finished.length) return {};
  let best = Infinity;
  const sofar = finished.map((trial) => sign * (best = Math.min(best, sign * trial.values[0])));
  const x = finished.map((trial) => trial.number);
  return { [name]: { x, mean: finished.map((trial) => trial.values[0]), points: true }, "best so far": { x, mean: sofar } };
}

// The curves of the best trials that were judged before their end.
function reports(trials, sign) {
  const last = (trial) => sign * (trial.reports.at(-1)?.[1] ?? Infinity);
  const judged = trials.filter((trial) => trial.reports.length).sort((a, b) => last(a) - last(b)).slice(0, MOST_CURVES);
  return Object.fromEntries(judged.map((trial) => [`trial ${trial.number}`, { x: trial.reports.map(([epoch]) => epoch), mean: trial.reports.map(([, one]) => one) }]));
}

function numeric(study) {
  return Object.entries(study.ranges).filter(([, range]) => !range.attributes.choices || range.attributes.choices.every((one) => typeof one === "number")).map(([name]) => name);
}

// One dot for every trial, all over one list of x, because several trials may share a value.
function scatters(done, name, param) {
  const sorted = [...done].sort((a, b) => a.params[param] - b.params[param]);
  const x = sorted.map((trial) => trial.params[param]);
  const only = (keep) => ({ x, mean: sorted.map((trial) => (keep(trial) ? reached(trial) : null)), points: true });
  const [finished, stopped] = [only((trial) => trial.state === "finished"), only((trial) => trial.state !== "finished")];
  return { [name]: finished, ...(stopped.mean.some((one) => one !== null) ? { "stopped early": stopped } : {}) };
}
