// All runs, live and past.
import { Columns } from "../columns.js";
import { empty, fill, h, link, moment, number, seconds, state, table, value } from "../dom.js";
import { sparkline } from "../drawings.js";

export const title = "Runs";
const MOST = 100;
const MOST_PARAMS = 30;
const GROUPS = {
  none: null,
  task: (run) => run.task || "–",
  strategy: (run) => run.strategy,
  state: (run) => run.state,
  tags: (run) => run.tags.join(", ") || "no tags",
  folder: (run) => run.id.slice(0, -run.name.length - 1) || "–",
};

export function open(host, _, store) {
  let sort = ["began", -1];
  let most = MOST;
  const filter = h("input", { type: "search", placeholder: "filter", "aria-label": "Filter runs by name, state, task, strategy or tag", oninput: () => update() });
  const trials = h("input", { type: "checkbox", id: "with-trials", onchange: () => update() });
  const by = h("select", { id: "group-by", onchange: () => update() }, Object.keys(GROUPS).map((name) => h("option", { value: name }, name)));
  const columns = new Columns("columns", () => update());
  const comparing = h("span");
  const count = h("span", { class: "soft", role: "status" });
  const list = h("div");
  host.append(h("h1", {}, title), h("div", { class: "tools" }, filter, h("span", { class: "pair" }, h("label", { for: "group-by" }, "Group by"), by), columns.node, h("label", { for: "with-trials" }, trials, " Show trials of studies"), comparing, count), list);

  function onsort(key) {
    sort = [key, sort[0] === key ? -sort[1] : -1];
    update();
  }

  function choose(id, checked) {
    if (checked) store.chosen.add(id);
    else store.chosen.delete(id);
    compare();
  }

  function more() {
    most = Infinity;
    update();
  }

  function compare() {
    const { chosen } = store;
    fill(comparing, chosen.size > 1 ? link("compare", [...chosen], `Compare ${chosen.size} runs`) : null);
  }

  function update() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => [run.id, run.state, run.task, run.strategy, ...run.tags, run.notes].join(" ").toLowerCase();
    const all = [...store.run.values()].filter((run) => trials.checked || !/\/trials\/\d+$/.test(run.id));
    const found = all.filter((run) => words.every((word) => text(run).includes(word)));
    const of = ordering(sort[0]);
    const group = GROUPS[by.value];
    found.sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      const order = x === null || y === null ? (x === null) - (y === null) : sort[1] * (x < y ? -1 : x > y ? 1 : 0);
      const groups = group ? group(a).localeCompare(group(b)) : 0;
      // Runs that are alike stay in one order, whichever was read first.
      return groups || order || b.began - a.began || (a.id < b.id ? -1 : 1);
    });
    count.textContent = found.length === all.length ? `${all.length} runs` : `${found.length} of ${all.length} runs`;
    const shown = columns.shown(described(all, store, choose));
    fill(list, all.length ? table("Runs", shown, found.slice(0, most), { sort, onsort, group }) : empty("No runs yet. ", h("code", {}, "manyhands fit FILE.py"), " writes them under runs/, and they appear here by themselves."));
    if (found.length > most) list.append(h("p", {}, h("button", { type: "button", "data-key": "more", onclick: more }, `Show all ${found.length} runs`)));
    compare();
  }

  return { title, update };
}

// The value of a run that a column is sorted by; null sorts last.
function ordering(key) {
  if (key.startsWith("param ")) return (run) => run.params[key.slice(6)] ?? null;
  if (key.startsWith("metric ")) return (run) => run.metrics[key.slice(7)] ?? null;
  return (run) => run[key] ?? null;
}

// All columns there are for some runs, as tables take them; those with `extra` are shown when the reader asks for them.
function described(runs, store, choose) {
  const names = (of) => [...new Set(runs.flatMap((run) => Object.keys(of(run))))];
  return [
    ["compare", (run) => h("input", { type: "checkbox", "aria-label": `Compare ${run.id}`, "data-key": `choose ${run.id}`, checked: store.chosen.has(run.id), onchange: (event) => choose(run.id, event.target.checked) }), { fixed: true }],
    ["run", (run) => link("run", run.id, run.id), { key: "id", fixed: true }],
    ["state", (run) => state(run.state), { key: "state" }],
    ["step", (run) => progress(run), { key: "step" }],
    ["curve", (run) => sparkline(run.outline)],
    ["loss", (run) => number(run.loss), { key: "loss", num: true }],
    ...names((run) => run.metrics).map((name, place) => [name, (run) => number(run.metrics[name]), { key: `metric ${name}`, num: true, extra: place > 2 }]),
    ["steps/s", (run) => number(run.steps_per_second, 3), { key: "steps_per_second", num: true }],
    ["samples/s", (run) => number(run.samples_per_second, 3), { key: "samples_per_second", num: true, extra: true }],
    ["strategy", (run) => run.strategy, { key: "strategy", narrow: true }],
    ["devices", (run) => String(run.devices.length), { num: true }],
    ["faults", (run) => (run.faults ? h("span", { class: "fault" }, String(run.faults)) : "0"), { key: "faults", num: true }],
    ["began", (run) => h("span", { title: moment(run.began) }, moment(run.began).slice(0, 16)), { key: "began" }],
    ["lasted", (run) => seconds(run.lasted), { key: "lasted", num: true, extra: true }],
    ["tags", (run) => run.tags.map((tag) => h("span", { class: "tag" }, tag)), { extra: !runs.some((run) => run.tags.length) }],
    ["notes", (run) => run.notes, { wide: true, extra: true }],
    ["task", (run) => run.task, { key: "task", extra: true }],
    ["commit", (run) => run.commit.slice(0, 10), { key: "commit", extra: true }],
    ...names((run) => run.params).slice(0, MOST_PARAMS).map((name) => [name, (run) => value(run.params[name]), { key: `param ${name}`, num: true, extra: true }]),
  ];
}

function progress(run) {
  const words = run.total ? `${number(run.step)} of ${number(run.total)}` : number(run.step);
  if (run.state !== "running" || !run.total) return words;
  return [h("progress", { value: run.step, max: run.total, "aria-label": `${run.id}: ${words} steps` }), " ", words];
}
