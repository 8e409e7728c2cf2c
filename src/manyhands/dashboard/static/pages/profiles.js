// Profiles: where a step's time goes by rank, and what to do about it.
import { empty, facts, fill, get, h, link, moment, number, seconds, state, table } from "../dom.js";
import { bars } from "../drawings.js";

export const title = "Profiles";

export function open(host, _, store) {
  const list = h("div");
  host.append(h("h1", {}, title), list);

  async function update() {
    const logs = [...store.log.values()].filter((log) => log.profiles).sort((a, b) => b.changed - a.changed);
    const found = (await Promise.all(logs.slice(0, 20).map((log) => get("log", { id: log.id })))).filter(Boolean);
    const slow = [...store.run.values()].filter((run) => run.state === "running");
    fill(list, found.length ? found.flatMap((log) => log.profiled.toReversed().map((profile) => one(log.id, profile))) : empty("No profiles yet. ", h("code", {}, "manyhands profile FILE.py --log profiles/first"), " keeps one; a run with --profile shows its own on its page."), slow.length ? h("section", {}, h("h2", {}, "Running now"), h("ul", {}, slow.map((run) => h("li", {}, link("run", run.id, run.id), " ", state(run.state))))) : null);
  }

  return { title, update };
}

function one(id, profile) {
  const rows = profile.ranks.map((rank) => [`rank ${rank.rank}`, rank.phases]);
  const advice = profile.advice.map((each) => h("li", {}, h("strong", {}, each.name), `: ${each.evidence}; ${each.remedy}`));
  const operations = profile.ranks[0]?.operations ?? [];
  return h("section", { class: "card" }, h("h2", {}, `${profile.task} (${id})`),
    facts([["when", moment(profile.t)], ["strategy", profile.strategy], ["step", seconds(profile.seconds)], ["samples/s", number(profile.samples_per_second, 3)], ["MFU, of the rate in large products", profile.mfu === null ? null : `${number(100 * profile.mfu, 3)}%`]]),
    rows.length ? bars("A step by rank", rows) : null,
    h("h3", {}, "Advice"), advice.length ? h("ol", {}, advice) : h("p", { class: "soft" }, "No advice."),
    operations.length ? h("details", {}, h("summary", { "data-key": `${id} ${profile.t}` }, "Operations"), table("Operations", [["operation", (op) => op.name], ["time", (op) => seconds(op.seconds), { num: true }]], operations.slice(0, 15))) : null);
}
