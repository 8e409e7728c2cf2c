// The log of one server: requests, latency, versions, splits, what happened.
import { Charts } from "../charts.js";
import { facts, fill, get, h, missing, moment, seconds, state, table, unreadable, unseen } from "../dom.js";
import { timeline } from "../drawings.js";

export const title = "Server";

export function open(host, [id], store) {
  const head = h("div");
  const grid = h("div", { class: "grid" });
  const charts = new Charts(grid);
  const below = h("div");
  host.append(head, unseen("Requests"), grid, below);

  async function update() {
    const log = store.log.has(id) ? await get("log", { id }) : null;
    if (!log) {
      fill(head, missing("log", id, "serving"));
      return;
    }
    fill(head, h("h1", {}, log.id, state(log.state)), unreadable(log), facts([log.serving.backends ? ["servers", log.serving.backends.join(", ")] : ["devices", (log.serving.devices ?? []).join(", ")], ["host", log.serving.host], ["HTTP", port(log.serving.http)], ["gRPC", port(log.serving.grpc)], ["since", moment(log.serving.t)]]));
    const { x, rate, refused, p50, p99 } = log.requests;
    charts.update({ "Requests per second": { curves: x.length ? { "all requests": { x, mean: rate }, refused: { x, mean: refused } } : {}, time: true }, Latency: { curves: x.length ? { p50: { x, mean: p50 }, p99: { x, mean: p99 } } : {}, time: true, format: seconds } });
    const versions = Object.entries(log.versions).flatMap(([model, all]) => Object.entries(all).map(([version, how]) => ({ model, version, how })));
    const splits = Object.entries(log.splits);
    const marks = log.news.map((one) => ({ t: one.t, text: one.text, kind: one.fault ? "fault" : ["version_available", "serving", "routing", "backend_up"].includes(one.kind) ? "good" : "plain" }));
    fill(below,
      log.serving.backends ? null : [h("h2", {}, "Versions"), table("Versions", [["model", (one) => one.model], ["version", (one) => one.version, { num: true }], ["state", (one) => one.how, { wide: true }], ["routing", (one) => marks_of(log, one)]], versions)],
      splits.length ? [h("h2", {}, "Splits"), table("Splits", [["name", ([name]) => name], ["shares", ([, shares]) => shares, { wide: true }]], splits)] : null,
      h("h2", {}, "Timeline"), marks.length ? timeline("Timeline", marks, [], marks[0].t, Math.max(log.changed, marks.at(-1).t)) : null,
      table("Events", [["when", (one) => moment(one.t)], ["what", (one) => h("span", { class: one.fault ? "fault" : null }, one.text), { wide: true }]], [...log.news].reverse().slice(0, 200)));
  }

  return { title: id ?? title, update };
}

function marks_of(log, one) {
  const labels = Object.entries(log.labels[one.model] ?? {}).filter(([, version]) => version === one.version).map(([label]) => `label ${label}`);
  return [...(log.current[one.model] === one.version ? ["current"] : []), ...labels].join(", ");
}

function port(one) {
  return one === undefined ? null : String(one);
}
