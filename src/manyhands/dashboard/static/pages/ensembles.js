// Ensembles: studies over seeds, their members, and whether the ensemble is right as often as it says.
import { Charts } from "../charts.js";
import { empty, facts, fill, get, h, link, number, state, table, value } from "../dom.js";

export const title = "Ensembles";

export function open(host, [id], store) {
  const list = h("div");
  const head = h("div");
  const grid = h("div", { class: "grid" });
  const charts = new Charts(grid);
  const members = h("section");
  host.append(h("h1", {}, title), list, head, grid, members);

  async function update() {
    const found = [...store.study.values()].filter((study) => study.is_ensemble).sort((a, b) => b.changed - a.changed);
    const shown = id ?? found[0]?.id;
    fill(list, found.length ? h("ul", {}, found.map((study) => h("li", {}, link("ensembles", study.id, study.id), study.id === shown ? " (shown)" : ""))) : empty("No ensembles yet. ", h("code", {}, "mh.ensemble(task, members=10)"), " trains one under studies/."));
    const study = store.study.has(shown) ? await get("study", { id: shown }) : null;
    if (!study) return;
    const ensemble = study.ensemble;
    fill(head, h("h2", {}, study.id, " ", state(study.state)), facts([
      ["members", ensemble ? String(ensemble.members.length) : number(study.num_trials)],
      ["combined by", ensemble?.combine],
      ["computed", ensemble ? (ensemble.stacked ? "all in one program" : "one after another") : null],
      ["accuracy of the ensemble", ensemble?.calibration ? number(ensemble.calibration.accuracy) : null],
      ["calibration error", ensemble?.calibration ? number(ensemble.calibration.error) : null],
      ...compared(ensemble?.comparison),
    ]));
    if (ensemble?.calibration) {
      const { confidence, right } = ensemble.calibration;
      charts.update({ Calibration: { curves: { ensemble: { x: confidence, mean: right }, perfect: { x: [0, 1], mean: [0, 1], dash: true } }, x: "confidence" } });
    }
    const rows = members_of(study);
    const parameters = [...new Set(rows.flatMap(({ trial }) => Object.keys(trial.params)))];
    const metrics = [...new Set(rows.flatMap(({ trial }) => Object.keys(trial.metrics)))];
    const columns = [
      ["member", ({ trial }) => run(study.id, trial, store), { num: true }],
      ["state", ({ trial }) => state(trial.state)],
      ...parameters.map((name) => [name, ({ trial }) => value(trial.params[name]), { num: true }]),
      ...metrics.map((name) => [name, ({ trial }) => number(trial.metrics[name]), { num: true }]),
      ["accuracy of the member", ({ alone }) => number(alone?.accuracy), { num: true }],
      ["calibration error of the member", ({ alone }) => number(alone?.error), { num: true }],
    ];
    fill(members, h("h2", {}, "Members"), table("Members", columns, rows));
  }

  return { title, update };
}

// The trials that are members, each with its own measurements; all trials while the members are still trained.
function members_of(study) {
  if (!study.ensemble?.members) return study.trials.map((trial) => ({ trial }));
  const by_name = new Map(study.trials.map((trial) => [folder(trial), trial]));
  return study.ensemble.members.map((name, place) => ({ trial: by_name.get(name), alone: study.ensemble.alone?.[place] })).filter(({ trial }) => trial);
}

// The ensemble beside its best member.
function compared(found) {
  if (!found) return [];
  const facts = [[`${found.measure} of the ensemble`, number(found.together)], [`${found.measure} of the best member`, `${number(found.best)} (${found.member})`]];
  return found.is_worse ? [...facts, ["what would help", String(found.advice)]] : facts;
}

function folder(trial) {
  return String(trial.number).padStart(5, "0");
}

function run(study, trial, store) {
  const inner = `${study}/trials/${folder(trial)}`;
  return store.run.has(inner) ? link("run", inner, String(trial.number)) : String(trial.number);
}
