// All studies.
import { empty, fill, h, link, moment, number, state, table, value } from "../dom.js";

export const title = "Studies";

export function open(host, _, store) {
  const list = h("div");
  host.append(h("h1", {}, title), list);

  function update() {
    const found = [...store.study.values()].filter((study) => study.is_search).sort((a, b) => b.changed - a.changed);
    const columns = [
      ["study", (study) => link("study", study.id, study.id)],
      ["state", (study) => state(study.state)],
      ["trials", (study) => number(Object.values(study.counts).reduce((a, b) => a + b, 0)), { num: true }],
      ...[...new Set(found.flatMap((study) => Object.keys(study.counts)))].map((name) => [name, (study) => number(study.counts[name] ?? 0), { num: true }]),
      ["best", (study) => best(study), { wide: true }],
      ["search", (study) => [study.search, study.stop].filter(Boolean).join(", ")],
      ["changed", (study) => moment(study.changed)],
    ];
    fill(list, found.length ? table("Studies", columns, found) : empty("No studies yet. ", h("code", {}, "manyhands tune FILE.py"), " writes them under studies/."));
  }

  return { title, update };
}

function best(study) {
  if (!study.best) return "–";
  const params = Object.entries(study.best.params).map(([name, one]) => `${name} ${value(one)}`).join(", ");
  return `${study.objectives[0]?.[0] ?? ""} ${number(study.best.values[0])} (trial ${study.best.number}: ${params})`;
}
