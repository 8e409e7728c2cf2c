// All runs, live and past.
import { empty, fill, h, link, moment, number, state, table } from "../dom.js";

export const title = "Runs";
const MOST = 500;

export function open(host, _, store) {
  let sort = ["began", -1];
  const filter = h("input", { type: "search", placeholder: "filter", "aria-label": "Filter runs by name, state, task or strategy", oninput: () => update() });
  const trials = h("input", { type: "checkbox", id: "with-trials", onchange: () => update() });
  const comparing = h("span");
  const count = h("span", { class: "soft", role: "status" });
  const list = h("div");
  host.append(h("h1", {}, title), h("div", { class: "tools" }, filter, h("label", { for: "with-trials" }, trials, " trials of studies too"), comparing, count), list);

  function onsort(key) {
    sort = [key, sort[0] === key ? -sort[1] : -1];
    update();
  }

  function choose(id, checked) {
    if (checked) store.chosen.add(id);
    else store.chosen.delete(id);
    compare();
  }

  function compare() {
    const { chosen } = store;
    fill(comparing, chosen.size > 1 ? link("compare", [...chosen], `Compare ${chosen.size} runs`) : null);
  }

  function update() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => [run.id, run.state, run.task, run.strategy].join(" ").toLowerCase();
    const all = [...store.run.values()].filter((run) => trials.checked || !/\/trials\/\d+$/.test(run.id));
    const found = all.filter((run) => words.every((word) => text(run).includes(word)));
    const of = (run) => (sort[0] in run ? run[sort[0]] : run.metrics[sort[0]]) ?? null;
    found.sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      const order = x === null || y === null ? (x === null) - (y === null) : sort[1] * (x < y ? -1 : x > y ? 1 : 0);
      // Runs that are alike stay in one order, whichever was read first.
      return order || b.began - a.began || (a.id < b.id ? -1 : 1);
    });
    count.textContent = found.length === all.length ? `${all.length} runs` : `${found.length} of ${all.length} runs`;
    const metrics = [...new Set(all.flatMap((run) => Object.keys(run.metrics)))].slice(0, 3);
    const columns = [
      ["compare", (run) => h("input", { type: "checkbox", "aria-label": `Compare ${run.id}`, "data-key": `choose ${run.id}`, checked: store.chosen.has(run.id), onchange: (event) => choose(run.id, event.target.checked) })],
      ["run", (run) => link("run", run.id, run.id), { key: "id" }],
      ["state", (run) => state(run.state), { key: "state" }],
      ["step", (run) => progress(run), { key: "step" }],
      ["loss", (run) => number(run.loss), { key: "loss", num: true }],
      ...metrics.map((name) => [name, (run) => number(run.metrics[name]), { key: name, num: true }]),
      ["steps/s", (run) => number(run.steps_per_second, 3), { key: "steps_per_second", num: true }],
      ["samples/s", (run) => number(run.samples_per_second, 3), { key: "samples_per_second", num: true }],
      ["strategy", (run) => run.strategy, { key: "strategy", narrow: true }],
      ["devices", (run) => String(run.devices.length), { num: true }],
      ["faults", (run) => (run.faults ? h("span", { class: "fault" }, String(run.faults)) : "0"), { key: "faults", num: true }],
      ["began", (run) => moment(run.began), { key: "began" }],
    ];
    fill(list, all.length ? table("Runs", columns, found.slice(0, MOST), { sort, onsort }) : empty("No runs yet. ", h("code", {}, "manyhands fit FILE.py"), " writes them under runs/, and they appear here by themselves."));
    if (found.length > MOST) list.append(h("p", { class: "soft" }, `The first ${MOST} are shown; filter to see others.`));
    compare();
  }

  return { title, update };
}

function progress(run) {
  const words = run.total ? `${number(run.step)} of ${number(run.total)}` : number(run.step);
  if (run.state !== "running" || !run.total) return words;
  return [h("progress", { value: run.step, max: run.total, "aria-label": `${run.id}: ${words} steps` }), " ", words];
}
