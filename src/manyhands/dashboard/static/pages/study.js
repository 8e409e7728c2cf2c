// One study: its course, parallel coordinates, slices, curves of its trials, and the trials.
import { Charts } from "../charts.js";
import { facts, fill, get, h, link, missing, number, seconds, state, table, unreadable, unseen, value } from "../dom.js";
import { parallel } from "../drawings.js";

export const title = "Study";
const [MOST_ROWS, MOST_CURVES, MOST_WAYS] = [200, 20, 500];

export function open(host, [id], store) {
  let sort = ["number", 1];
  let study = null;
  let drawnFor = 0;
  const head = h("div");
  const grid = h("div", { class: "grid" });
  const charts = new Charts(grid);
  const ways = h("section");
  const slices = h("div", { class: "grid" });
  const sliceCharts = new Charts(slices);
  const trials = h("section");
  const sliced = h("section", { "aria-label": "Slices", hidden: true }, h("h2", {}, "Slices"), slices);
  // In a window of another size the drawing is made anew.
  new ResizeObserver(() => { if (study && drawnFor !== ways.clientWidth) drawWays(); }).observe(ways);
  host.append(head, unseen("Curves"), grid, ways, sliced, trials);

  async function update() {
    study = store.study.has(id) ? await get("study", { id }) : null;
    if (!study) {
      fill(head, missing("study", id, "studies"));
      return;
    }
    const [[name = "value", mode = "min"] = []] = study.objectives;
    const sign = mode === "max" ? -1 : 1;
    const done = study.trials.filter((trial) => Number.isFinite(reached(trial)));
    const finished = done.filter((trial) => trial.state === "finished");
    const fronts = study.objectives.length > 1 ? front(finished, study.objectives) : [];
    fill(head, h("h1", {}, study.id, state(study.state)), unreadable(study), facts([
      ["objective", study.objectives.map(([one, how]) => `${one} (${how})`).join(", ")],
      ["trials", number(study.num_trials)],
      ...Object.entries(study.counts).map(([one, count]) => [one, number(count)]),
      [study.objectives.length > 1 ? `best ${name}` : "best", study.best ? number(study.best.values[0]) : null],
      ["best trial", study.best ? `${study.best.number}: ${Object.entries(study.best.params).map(([key, one]) => `${key} ${value(one)}`).join(", ")}` : null],
      ["Pareto-optimal trials", fronts.map((trial) => trial.number).join(", ")],
      ["search", study.search], ["stops", study.stop], ["epochs", value(study.about.epochs)],
    ]));
    charts.update({ "Optimization history": { curves: course(finished, name, sign), x: "trial" }, "Trials by epoch": { curves: reports(study.trials, sign), x: "epoch" } });
    drawWays();
    sliced.hidden = !done.length;
    if (done.length) sliceCharts.update(Object.fromEntries(Object.entries(study.ranges).map(([param, range]) => [`${name} by ${param}`, slice(done, name, param, range.attributes)])));
    list(fronts);
  }

  function drawWays() {
    drawnFor = ways.clientWidth;
    const sign = study.objectives[0]?.[1] === "max" ? -1 : 1;
    const done = study.trials.filter((trial) => Number.isFinite(reached(trial)));
    const axes = [...Object.entries(study.ranges).map(([param, range]) => ({ name: param, of: (trial) => trial.params[param], log: range.attributes.log, low: range.attributes.low, high: range.attributes.high, choices: range.attributes.choices })), ...study.objectives.map(([name], place) => ({ name, of: (trial) => reached(trial, place) }))];
    const shown = done.slice(-MOST_WAYS);
    fill(ways, h("h2", {}, "Parallel coordinates"), shown.length ? h("div", { class: "card" }, parallel("Parallel coordinates", axes, shown, study.best?.number ?? null, (trial) => sign * reached(trial), ways.clientWidth - 30)) : h("p", { class: "soft" }, "No trial has a value yet."));
  }

  function list(fronts) {
    const params = Object.keys(study.ranges);
    const of = { number: (trial) => trial.number, state: (trial) => trial.state, seconds: (trial) => trial.seconds, ...Object.fromEntries(study.objectives.map(([name], place) => [`value ${name}`, (trial) => reached(trial, place) ?? null])), ...Object.fromEntries(params.map((one) => [`params ${one}`, (trial) => trial.params[one]])) };
    const sorted = [...study.trials].sort((a, b) => {
      const [x, y] = [of[sort[0]](a), of[sort[0]](b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return sort[1] * (x < y ? -1 : x > y ? 1 : 0);
    });
    const columns = [
      ["trial", (trial) => run(trial), { key: "number", num: true }],
      ["state", (trial) => state(trial.state), { key: "state" }],
      ...study.objectives.map(([name], place) => [name, (trial) => number(reached(trial, place)), { key: `value ${name}`, num: true }]),
      ...params.map((one) => [one, (trial) => value(trial.params[one]), { key: `params ${one}`, num: true }]),
      ["epochs", (trial) => number(epochs(trial)), { num: true }],
      ["time", (trial) => seconds(trial.seconds), { key: "seconds", num: true }],
      ["worker", (trial) => value(trial.worker), { num: true }],
      ["why", (trial) => trial.reason, { wide: true }],
    ];
    const onsort = (key) => {
      sort = [key, sort[0] === key ? -sort[1] : 1];
      list(fronts);
    };
    const best = new Set(fronts.length ? fronts.map((trial) => trial.number) : [study.best?.number]);
    fill(trials, h("h2", {}, "Trials"), table("Trials", columns, sorted.slice(0, MOST_ROWS), { sort, onsort, row: (trial) => ({ class: best.has(trial.number) ? "chosen" : null }) }), sorted.length > MOST_ROWS ? h("p", { class: "soft" }, `${MOST_ROWS} of ${study.num_trials} are shown.`) : null);
  }

  // Who comes to the end without being judged on the way has taken all epochs.
  function epochs(trial) {
    return trial.reports.at(-1)?.[0] ?? (trial.state === "finished" ? study.about.epochs : null);
  }

  function run(trial) {
    const inner = `${study.id}/trials/${String(trial.number).padStart(5, "0")}`;
    return store.run.has(inner) ? link("run", inner, String(trial.number)) : String(trial.number);
  }

  return { title: id ?? title, update };
}

// What a trial has come to: its value, or that of its last report where it was stopped before its end.
function reached(trial, place = 0) {
  return trial.values[place] ?? (place ? undefined : trial.reports.at(-1)?.[1]);
}

// Trials that no other one beats in all objectives.
function front(trials, objectives) {
  const costs = (trial) => objectives.map(([, mode], place) => (mode === "max" ? -1 : 1) * trial.values[place]);
  const all = trials.filter((trial) => trial.feasible).map((trial) => [trial, costs(trial)]);
  const beats = (a, b) => a.every((one, place) => one <= b[place]) && a.some((one, place) => one < b[place]);
  return all.filter(([, mine]) => !all.some(([, other]) => beats(other, mine))).map(([trial]) => trial);
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

// One dot for every trial, all over one list of x, because several trials may share a value.
function slice(done, name, param, { log, choices }) {
  const names = choices?.some((one) => typeof one !== "number") ? choices.map(value) : null;
  const at = (trial) => (names ? names.indexOf(value(trial.params[param])) : trial.params[param]);
  const sorted = [...done].sort((a, b) => at(a) - at(b));
  const x = sorted.map(at);
  const only = (keep) => ({ x, mean: sorted.map((trial) => (keep(trial) ? reached(trial) : null)), points: true });
  const [finished, stopped] = [only((trial) => trial.state === "finished"), only((trial) => trial.state !== "finished")];
  const curves = { [name]: finished, ...(stopped.mean.some((one) => one !== null) ? { "stopped early": stopped } : {}) };
  return { curves, x: param, logX: Boolean(log), names };
}
