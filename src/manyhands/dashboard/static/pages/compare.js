// Some runs side by side: their curves in one chart, and what was asked for where it differs.
import { Charts } from "../charts.js";
import { CurveView } from "../view.js";
import { address, empty, fill, get, h, link, number, state, table, unseen, value } from "../dom.js";

export const title = "Compare";
const MOST = 8;

export function open(host, given, store) {
  // Runs that were ticked come along however one gets here, and those of an address are ticked.
  if (given.length) store.chosen = new Set(given);
  else if (store.chosen.size) history.replaceState(null, "", address("compare", [...store.chosen]));
  const ids = [...store.chosen].slice(0, MOST);
  let runs = [];
  const view = new CurveView(() => draw());
  const grid = h("div", { class: "grid" });
  const charts = new Charts(grid);
  const differences = h("section");
  const pick = h("div");
  host.append(h("h1", {}, title), pick, view.node, unseen("Curves"), grid, differences);

  async function update() {
    chooser();
    if (!ids.length) return;
    runs = (await Promise.all(ids.filter((id) => store.run.has(id)).map((id) => get("run", { id })))).filter(Boolean);
    draw();
    fill(differences, h("h2", {}, "What differs"), table("Differences", [["what", ([name]) => name], ...runs.map((run) => [link("run", run.id, run.id), ([, cells]) => cells[run.id], { wide: true }])], rows(runs)));
  }

  function draw() {
    view.node.hidden = !runs.length;
    view.use(Object.fromEntries(runs.map((run) => [run.id, run.clock])));
    const groups = {};
    for (const kind of ["losses", "metrics", "speed", "logged"]) {
      for (const name of new Set(runs.flatMap((run) => Object.keys(run.series[kind])))) {
        const has = runs.filter((run) => name in run.series[kind]);
        const gaps = kind === "losses" ? Object.fromEntries(has.filter((run) => run.gaps[name]).map((run) => [run.id, run.gaps[name]])) : {};
        groups[name] = view.chart(Object.fromEntries(has.map((run) => [run.id, run.series[kind][name]])), { gaps, of: (id) => id });
      }
    }
    charts.update(groups);
  }

  function chooser() {
    if (pick.contains(document.activeElement)) return;
    const rest = [...store.run.values()].filter((run) => !ids.includes(run.id)).sort((a, b) => b.began - a.began);
    const select = h("select", { "aria-label": "Add a run", onchange: (event) => choose([...ids, event.target.value]) }, h("option", { value: "" }, "add a run …"), rest.slice(0, 500).map((run) => h("option", { value: run.id }, run.id)));
    const chosen = ids.map((id) => h("li", {}, link("run", id, id), " ", h("button", { type: "button", "aria-label": `Leave out ${id}`, onclick: () => choose(ids.filter((one) => one !== id)) }, "×")));
    const more = store.chosen.size - ids.length;
    fill(pick, h("div", { class: "tools" }, h("ul", { class: "runs" }, chosen), ids.length < MOST && rest.length ? select : null, more > 0 ? h("span", { class: "soft" }, `The first ${MOST} of ${store.chosen.size} that are ticked are compared.`) : null), ids.length ? null : empty(rest.length ? "Choose runs here, or tick them in the " : "There are no runs yet: see the ", link("runs", [], "list of runs"), "."));
  }

  function choose(next) {
    store.chosen = new Set(next);
    location.hash = address("compare", next);
  }

  return { title, update };
}

function rows(runs) {
  const flat = runs.map((run) => ({ strategy: run.strategy, devices: run.devices.join(", "), ...texts({ ...run.record.defaults, ...run.record.params }), "batch size": value(run.record.batch_size), seed: value(run.record.seed), epochs: value(run.record.epochs), torch: value(run.record.torch), commit: run.commit.slice(0, 10), host: value(run.record.environment?.host), tags: run.tags.join(", ") }));
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

function texts(values) {
  return Object.fromEntries(Object.entries(values).map(([name, one]) => [name, value(one)]));
}
