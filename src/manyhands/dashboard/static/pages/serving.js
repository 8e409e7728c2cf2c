// Serving: requests a second, latency, versions; of running servers by their metrics, of others by their logs.
import { Charts } from "../charts.js";
import { empty, fill, get, h, link, moment, number, seconds, state, table, unseen } from "../dom.js";

export const title = "Serving";

export function open(host, _, store) {
  const now = h("div");
  const grid = h("div", { class: "grid" });
  const charts = new Charts(grid);
  const list = h("div");
  host.append(h("h1", {}, title), now, unseen("Requests"), grid, list);

  async function update() {
    const servers = await get("servers");
    const versions = servers.flatMap((server) => server.versions.map((one) => ({ ...one, url: server.url })));
    const columns = [
      ["server", (one) => one.url],
      ["model", (one) => one.model],
      ["version", (one) => one.version, { num: true }],
      ["state", (one) => (one.available ? "serves" : "not available")],
      ["routing", (one) => one.marks.join(", "), { wide: true }],
      ["requests/s", (one) => number(one.series.rate.at(-1), 3), { num: true }],
      ["p50", (one) => seconds(one.series.p50.findLast((each) => each !== null)), { num: true }],
      ["p99", (one) => seconds(one.series.p99.findLast((each) => each !== null)), { num: true }],
      ["waiting rows", (one) => number(one.queue_rows), { num: true }],
      ["replicas", (one) => number(one.replicas), { num: true }],
      ["answers", (one) => Object.entries(one.codes).map(([code, count]) => `${code} ${number(count)}`).join(", ")],
    ];
    const backends = servers.flatMap((server) => server.backends.map((one) => ({ ...one, url: server.url })));
    const behind = [
      ["router", (one) => one.url],
      ["server", (one) => one.backend],
      ["state", (one) => state(one.up ? "serving" : "lost")],
      ["answers/s", (one) => number(one.series.rate.at(-1), 3), { num: true }],
      ["in flight", (one) => number(one.busy), { num: true }],
      ["answered", (one) => number(one.answered), { num: true }],
      ["retried elsewhere", (one) => number(one.lost), { num: true }],
    ];
    fill(now, servers.filter((server) => server.error).map((server) => h("p", { class: "fault" }, server.error)), versions.length ? table("Versions", columns, versions) : null, backends.length ? table("Servers behind a router", behind, backends) : null);
    const curves = (pick) => Object.fromEntries(versions.filter((one) => one.series.x.length).map((one) => [`${one.model} ${one.version}`, pick(one.series)]));
    const both = Object.fromEntries(versions.filter((one) => one.series.x.length).flatMap((one) => ["p50", "p99"].map((name) => [`${one.model} ${one.version} ${name}`, { x: one.series.x, mean: one.series[name] }])));
    const shared = Object.fromEntries(backends.filter((one) => one.series.x.length).map((one) => [one.backend, { x: one.series.x, mean: one.series.rate }]));
    const routed = backends.length ? { "Responses per second, by server": { curves: shared, time: true } } : {};
    charts.update({ ...routed, "Requests per second": { curves: curves((series) => ({ x: series.x, mean: series.rate })), time: true }, Latency: { curves: both, time: true, format: seconds } });
    const logs = [...store.log.values()].filter((log) => log.serves).sort((a, b) => b.changed - a.changed);
    fill(list, logs.length ? [h("h2", {}, "Logs of servers"), table("Logs of servers", [["log", (log) => link("log", log.id, log.id)], ["state", (log) => state(log.state)], ["current version", (log) => Object.entries(log.current).map(([model, version]) => `${model} ${version}`).join(", "), { wide: true }], ["split", (log) => Object.entries(log.splits).map(([name, shares]) => `${name}: ${shares}`).join("; "), { wide: true }], ["changed", (log) => moment(log.changed)]], logs)] : servers.length ? null : empty("No servers yet. ", h("code", {}, "manyhands dashboard --server http://127.0.0.1:8501"), " shows a running server; ", h("code", {}, "manyhands serve models/ --log logs/first"), " keeps a log."));
  }

  return { title, update };
}
