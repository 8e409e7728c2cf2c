// The cluster: hosts, their devices, what runs on each; and a partitioned network, drawn over its devices.
import { bytes, empty, fill, get, h, link, state } from "../dom.js";
import { pieces } from "../drawings.js";

export const title = "Cluster";
const MOST_DRAWN = 3;

export function open(host) {
  const past = h("input", { type: "checkbox", id: "with-past", onchange: () => update() });
  const hosts = h("div");
  const drawn = h("div");
  host.append(h("h1", {}, title), h("div", { class: "tools" }, h("label", { for: "with-past" }, past, " Show finished")), hosts, drawn);

  async function update() {
    const all = await get("cluster");
    const running = all.filter((one) => past.checked || one.state === "running" || one.state === "serving");
    const byHost = grouped(running);
    const cards = [...byHost].sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, entries]) => h("section", { class: "card", "aria-label": `Host ${name}` }, h("h2", {}, name), h("div", { class: "devices" }, devices(entries))));
    fill(hosts, cards.length ? cards : empty("No runs are active. Tick “Show finished” to see earlier ones. Runs that ", h("code", {}, "manyhands fit FILE.py"), " starts appear here."));
    const partition = [...new Map(all.filter((one) => one.partition).sort((a, b) => (b.state === "running") - (a.state === "running") || b.changed - a.changed).map((one) => [one.id, one])).values()].slice(0, MOST_DRAWN);
    const runs = (await Promise.all(partition.map((one) => get("run", { id: one.id })))).filter((run) => run?.partition);
    fill(drawn, runs.map((run) => h("section", {}, h("h2", {}, link("run", run.id, run.id), " partition ", state(run.state)), pieces(run.partition, run.id))));
  }

  return { title, update };
}

function devices(entries) {
  const found = new Map();
  for (const one of entries) found.set(one.device, [...(found.get(one.device) ?? []), one]);
  return [...found].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true })).map(([name, there]) => h("div", { class: "device" }, h("h3", {}, name), h("ul", {}, there.map((one) => h("li", {}, link(one.rank === null ? "log" : "run", one.id, one.id), one.rank === null ? "" : `, rank ${one.rank}`, one.memory ? `, ${bytes(one.memory)}` : "", " ", state(one.state), one.slow ? h("span", { class: "fault" }, " slow") : "")))));
}

function grouped(entries) {
  const found = new Map();
  for (const one of entries) found.set(one.host, [...(found.get(one.host) ?? []), one]);
  return found;
}
