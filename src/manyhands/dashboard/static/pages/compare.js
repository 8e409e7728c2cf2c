// Some runs side by side: their curves in one chart, and what was asked for where it differs.
import { Charts } from "../charts.js";
import { empty, fill, get, h, link, number, state, table, value } from "../dom.js";

export const title = "Compare";
const MOST = 8;

export function open(host, given, store) {
  const ids = given.slice(0, MOST);
  const grid = h("div", { class: "grid" });
  const charts = new Charts(grid);
  const differences = h("section", { "aria-label": "Differences" });
  const pick = h("div");
  host.append(h("h1", {}, title), pick, grid, differences);

  async function update() {
    chooser();
    if (!ids.length) return;
    const runs = (await Promise.all(ids.map((id) => get("run", { id })))).filter(Boolean);
    const groups = {};
    for (const kind of ["losses", "metrics", "speed", "logged"]) {
      for (const name of new Set(runs.flatMap((run) => Object.keys(run.series[kind])))) {
        const curves = Object.fromEntries(runs.filter((run) => name in run.series[kind]).map((run) => [run.id, run.series[kind][name]]));
        groups[name] = { curves };
      }
    }
    charts.update(groups);
    fill(differences, h("h2", {}, "What differs"), table("Differences", [["", ([name]) => name], ...runs.map((run) => [link("run", run.id, run.id), ([, cells]) => cells[run.id], { wide: true }])], rows(runs)));
  }

  function chooser() {
    const rest = [...store.run.values()].filter((run) => !ids.includes(run.id)).sort((a, b) => b.began - a.began);
    const select = h("select", { "aria-label": "Add a run", "data-key": "add", onchange: (event) => { location.hash = `#/compare?${[...ids, event.target.value].map((id) => `id=${encodeURIComponent(id)}`).join("&")}`; } }, h("option", { value: "" }, "add a run …"), rest.slice(0, 500).map((run) => h("option", { value: run.id }, run.id)));
    if (!pick.contains(document.activeElement)) fill(pick, h("div", { class: "tools" }, ids.length < MOST && rest.length ? select : null), ids.length ? null : empty("Choose runs here, or tick them in the list of runs."));
  }

  return { title, update };
}

function rows(runs) {
  const flat = runs.map((run) => ({ strategy: run.strategy, devices: run.devices.join(", "), ...prefixed(run.record.params ?? {}, ""), "batch size": value(run.record.batch_size), seed: value(run.record.seed), epochs: value(run.record.epochs), torch: value(run.record.torch) }));
  const names = [...new Set(flat.flatMap(Object.keys))].filter((name) => new Set(flat.map((one) => one[name])).size > 1);
  const last = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
  const cells = (pick) => Object.fromEntries(runs.map((run, place) => [run.id, pick(run, place)]));
  return [
    ["state", cells((run) => state(run.state))],
    ["loss", cells((run) => number(run.loss))],
    ...last.map((name) => [name, cells((run) => number(run.metrics[name]))]),
    ["steps/s", cells((run) => number(run.steps_per_second, 3))],
    ["faults", cells((run) => String(run.faults))],
    ...names.map((name) => [name, cells((_, place) => flat[place][name] ?? "–")]),
  ];
}

function prefixed(values, prefix) {
  return Object.fromEntries(Object.entries(values).map(([name, one]) => [prefix + name, value(one)]));
}
