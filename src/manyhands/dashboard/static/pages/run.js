// One run: curves, ranks, time line, the network in pieces.
import { Charts } from "../charts.js";
import { byKind, byName } from "../curves.js";
import { byteRate, bytes, facts, fill, get, h, link, missing, moment, number, seconds, state, table, unreadable, unseen, value } from "../dom.js";
import { bars, pieces, timeline } from "../drawings.js";
import { CurveView } from "../view.js";

export const title = "Run";
const WAITS = ["compute", "input", "sync", "optimizer", "save", "validation"];
const MOST_NEWS = 200;

export function open(host, [id], store) {
  const head = h("div");
  const view = new CurveView(() => run && draw());
  const grid = h("div", { class: "grid" });
  const charts = new Charts(grid);
  const ranks = h("section");
  const rankGrid = h("div", { class: "grid" });
  const rankCharts = new Charts(rankGrid);
  const line = h("section");
  const news = h("div");
  const faultsOnly = h("input", { type: "checkbox", id: "faults-only", onchange: () => tell() });
  const below = h("div");
  let run = null;
  const hostGrid = h("div", { class: "grid" });
  const hostCharts = new Charts(hostGrid);
  const usage = h("section", { "aria-label": "Utilization", hidden: true }, h("h2", {}, "Utilization of the host"), hostGrid);
  host.append(head, view.node, unseen("Curves"), grid, ranks, rankGrid, usage, line, below);

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
    draw();
    const numbers = Object.keys(run.ranks);
    if (numbers.length) fill(ranks, h("h2", {}, "Ranks"), ...breakdown(run), rankTable(run));
    utilize();
    drawLine();
    fill(below, run.partition ? h("section", {}, h("h2", {}, "Partition of the network"), pieces(run.partition, run.id)) : null, run.split ? h("section", {}, h("h2", {}, "Placement of layers"), h("pre", { tabindex: "0" }, run.split.lines.join("\n"))) : null, Object.keys(run.servers).length ? h("section", { "aria-label": "Servers" }, h("h2", {}, "Between workers and servers"), facts(exchanged(run.servers))) : null, run.has_plan ? h("p", {}, link("plans", run.id, "The plan that this run follows")) : null, environment(run.record), h("details", {}, h("summary", { "data-key": "record" }, "Configuration"), h("pre", { tabindex: "0" }, JSON.stringify(run.record, null, 2))));
  }

  // The curves, which are drawn again when the reader smooths them.
  function draw() {
    view.use({ run: run.clock });
    const shown = (curves, options) => view.chart(curves, options);
    const groups = (found) => Object.fromEntries(Object.entries(found).map(([title, curves]) => [title, shown(curves)]));
    charts.update({
      Loss: shown(run.series.losses, { gaps: run.gaps }),
      ...groups(byKind(run.series.metrics)),
      "Steps per second": shown(run.series.speed),
      "Learning rate": shown(run.series.rates),
      ...groups(byName(run.series.logged)),
    });
    rankCharts.update({
      "Compute time of a step, by rank": { ...shown(run.series.pace), format: seconds },
      "Memory, by rank": { curves: run.series.memory, format: bytes, time: true },
    });
  }

  function utilize() {
    const { share, memory, network, host: name } = run.usage;
    usage.hidden = !Object.keys(share).length;
    usage.querySelector("h2").textContent = `Utilization of ${name || "the host"}`;
    hostCharts.update({
      "CPU and GPU": { curves: share, time: true, format: (one, digits) => `${number(one, digits)}%` },
      "Memory in use": { curves: memory, time: true, format: bytes },
      Network: { curves: network, time: true, format: byteRate },
    });
  }

  function drawLine() {
    const marks = run.news.map((one) => ({ t: one.t, text: `${one.kind}: ${one.text}`, kind: one.fault ? "fault" : one.kind === "recovered" || one.kind === "start" || one.kind === "end" ? "good" : "plain" }));
    const drawn = timeline("Timeline", marks, run.checkpoints.map(([t]) => t), run.began, run.changed);
    if (!line.childElementCount) line.append(h("h2", {}, "Timeline"), h("div", { class: "drawn" }), h("div", { class: "tools" }, h("label", { for: "faults-only" }, faultsOnly, " faults only")), news);
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
    ...Object.entries({ ...run.record.defaults, ...run.record.params }).map(([name, one]) => [name, value(one)]),
    ["tags", run.tags.length ? run.tags.map((tag) => h("span", { class: "tag" }, tag)) : null],
    ["notes", run.notes],
  ]);
}

// Where the run was started, and with what.
function environment(record) {
  const { commit, branch, host, platform, cpus, command } = record.environment ?? {};
  const found = [["commit", commit], ["branch", branch], ["host", host], ["platform", platform], ["processors", cpus && number(cpus)], ["Python", record.python], ["torch", record.torch], ["manyhands", record.manyhands], ["command", command ? h("code", {}, command) : null]];
  return found.some(([, what]) => what) ? h("section", { "aria-label": "Environment" }, h("h2", {}, "Environment"), facts(found.map(([name, what]) => [name, what instanceof Node ? what : what && value(what)]))) : null;
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
    ["compute time", ([, rank]) => (rank.pace === null ? "–" : seconds(rank.pace)), { num: true }],
    ["memory", ([, rank]) => bytes(rank.memory), { num: true }],
    ...(Object.values(run.ranks).some((rank) => rank.peak) ? [["at the most", ([, rank]) => bytes(rank.peak), { num: true }]] : []),
    ...(Object.values(run.ranks).some((rank) => rank.held.parameters) ? ["parameters", "optimizer"].map((what) => [what, ([, rank]) => bytes(rank.held[what]), { num: true }]) : []),
    ["note", ([, rank]) => (rank.slow ? h("span", { class: "fault" }, "straggler: all ranks wait for it") : "")],
  ];
  return table("Ranks", columns, Object.entries(run.ranks));
}
