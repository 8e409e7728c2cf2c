// One run: curves, ranks, time line, the network in pieces.
import { Charts } from "../charts.js";
import { bytes, facts, fill, get, h, link, missing, moment, number, seconds, state, table, unreadable, value } from "../dom.js";
import { bars, pieces, timeline } from "../drawings.js";

export const title = "Run";
const WAITS = ["compute", "input", "sync", "optimizer", "save", "validation"];
const MOST_NEWS = 200;

export function open(host, [id], store) {
  const head = h("div");
  const grid = h("div", { class: "grid" });
  const charts = new Charts(grid);
  const ranks = h("section", { "aria-label": "Ranks" });
  const rankGrid = h("div", { class: "grid" });
  const rankCharts = new Charts(rankGrid);
  const line = h("section", { "aria-label": "Time line" });
  const news = h("div");
  const faultsOnly = h("input", { type: "checkbox", id: "faults-only", onchange: () => tell() });
  const below = h("div");
  let run = null;
  host.append(head, grid, ranks, rankGrid, line, below);

  function tell() {
    const shown = run.news.filter((one) => !faultsOnly.checked || one.fault).slice(-MOST_NEWS).reverse();
    const columns = [
      ["when", (one) => moment(one.t)],
      ["step", (one) => number(one.step), { num: true }],
      ["what", (one) => h("span", { class: one.fault ? "fault" : null }, one.kind)],
      ["in words", (one) => one.text, { wide: true }],
    ];
    fill(news, shown.length ? table("Events", columns, shown) : h("p", { class: "soft" }, "No events."));
  }

  async function update() {
    const found = store.run.has(id) ? await get("run", { id }) : null;
    if (!found) {
      fill(head, missing("run", id, "runs"));
      return;
    }
    run = found;
    fill(head, h("h1", {}, run.id, state(run.state)), run.reason ? h("p", { class: "fault" }, run.reason) : null, unreadable(run), about(run));
    charts.update({
      Loss: { curves: run.series.losses },
      Metrics: { curves: run.series.metrics },
      "Steps per second": { curves: run.series.speed },
      "Learning rate": { curves: run.series.rates },
      Logged: { curves: run.series.logged },
    });
    const numbers = Object.keys(run.ranks);
    if (numbers.length) fill(ranks, h("h2", {}, "Ranks"), ...breakdown(run), rankTable(run));
    rankCharts.update({
      "Compute time of a step, by rank": { curves: run.series.pace, format: seconds },
      "Memory, by rank": { curves: run.series.memory, format: bytes, time: true },
    });
    drawLine();
    fill(below, run.partition ? h("section", { "aria-label": "Partition of the network" }, h("h2", {}, "Partition of the network"), pieces(run.partition)) : null, run.split ? h("section", {}, h("h2", {}, "Placement of layers"), h("pre", { tabindex: "0" }, run.split.lines.join("\n"))) : null, Object.keys(run.servers).length ? h("section", { "aria-label": "Servers" }, h("h2", {}, "Between workers and servers"), facts(exchanged(run.servers))) : null, run.has_plan ? h("p", {}, link("plans", run.id, "The plan that this run follows")) : null, h("details", {}, h("summary", { "data-key": "record" }, "Options of the run"), h("pre", { tabindex: "0" }, JSON.stringify(run.record, null, 2))));
  }

  function drawLine() {
    const marks = run.news.map((one) => ({ t: one.t, text: `${one.kind}: ${one.text}`, kind: one.fault ? "fault" : one.kind === "recovered" || one.kind === "start" || one.kind === "end" ? "good" : "plain" }));
    const drawn = timeline("Time line", marks, run.checkpoints.map(([t]) => t), run.began, run.changed);
    if (!line.childElementCount) line.append(h("h2", {}, "Time line"), h("div", { class: "drawn" }), h("div", { class: "tools" }, h("label", { for: "faults-only" }, faultsOnly, " faults only")), news);
    fill(line.querySelector(".drawn"), drawn);
    tell();
  }

  return { title: id ?? title, update };
}

function about(run) {
  const steps = run.total ? `${number(run.step)} of ${number(run.total)}` : number(run.step);
  const left = run.state === "running" && run.total && run.steps_per_second ? seconds((run.total - run.step) / run.steps_per_second) : null;
  return facts([
    ["step", steps],
    ["time left", left],
    ["loss", number(run.loss)],
    ...Object.entries(run.metrics).map(([name, last]) => [name, number(last)]),
    ["steps/s", number(run.steps_per_second, 3)],
    ["samples/s", number(run.samples_per_second, 3)],
    ["strategy", run.strategy],
    ["devices", run.devices.join(", ")],
    ["batch", value(run.record.batch_size)],
    ["parameters", number(run.parameters)],
    ["began", moment(run.began)],
    ["lasted", seconds(run.changed - run.began)],
    ["faults", String(run.faults)],
    ["recoveries", String(run.recovered)],
    ...Object.entries(run.record.params ?? {}).map(([name, one]) => [name, value(one)]),
  ]);
}

// Where each rank's time went: steps that were timed where there are some, and the whole run's waits.
function breakdown(run) {
  const rows = (pick) => Object.entries(run.ranks).map(([number, rank]) => [`rank ${number}`, pick(rank)]).filter(([, amounts]) => Object.keys(amounts).length);
  const phases = rows((rank) => rank.phases);
  const waits = rows((rank) => Object.fromEntries(WAITS.filter((name) => name in rank.seconds).map((name) => [name, rank.seconds[name]])));
  return [
    phases.length ? h("div", { class: "card" }, h("h3", {}, "Typical step by phase (median of timed steps)"), bars("Typical step by rank", phases)) : null,
    waits.length ? h("div", { class: "card" }, h("h3", {}, "Time so far by phase"), bars("Time so far by rank", waits)) : null,
  ].filter(Boolean);
}

// What happened between workers and parameter servers: how old values were, and what each server did.
function exchanged(servers) {
  const words = {
    staleness: (found) => Object.entries(found).map(([age, count]) => `${number(count)} × ${age}`).join(", "),
    bytes: (found) => found.map((one) => bytes(one)).join(", "),
    ledger: (found) => found.map((one) => number(one)).join(", "),
  };
  const names = { staleness: "updates × staleness", bytes: "bytes by server", ledger: "updates by server" };
  return Object.entries(servers).map(([name, one]) => [names[name] ?? name.replaceAll("_", " "), (words[name] ?? value)(one)]);
}

function rankTable(run) {
  const columns = [
    ["rank", ([name]) => name, { num: true }],
    ["host", ([, rank]) => rank.host || "–"],
    ["device", ([name, rank]) => rank.device || run.devices[Number(name)] || "–"],
    ["own work", ([, rank]) => (rank.pace === null ? "–" : seconds(rank.pace)), { num: true }],
    ["memory", ([, rank]) => bytes(rank.memory), { num: true }],
    ...(Object.values(run.ranks).some((rank) => rank.peak) ? [["at the most", ([, rank]) => bytes(rank.peak), { num: true }]] : []),
    ...(Object.values(run.ranks).some((rank) => rank.held.parameters) ? ["parameters", "optimizer"].map((what) => [what, ([, rank]) => bytes(rank.held[what]), { num: true }]) : []),
    ["note", ([, rank]) => (rank.slow ? h("span", { class: "fault" }, "straggler: all ranks wait for it") : "")],
  ];
  return table("Ranks", columns, Object.entries(run.ranks));
}
