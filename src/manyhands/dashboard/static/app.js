// The page: which view is shown, what has changed since, keys, light and dark.
import { forget, redraw } from "./charts.js";
import { bytes, empty, fill, get, h } from "./dom.js";
import * as cluster from "./pages/cluster.js";
import * as compare from "./pages/compare.js";
import * as log from "./pages/log.js";
import * as plans from "./pages/plans.js";
import * as profiles from "./pages/profiles.js";
import * as run from "./pages/run.js";
import * as runs from "./pages/runs.js";
import * as serving from "./pages/serving.js";
import * as studies from "./pages/studies.js";
import * as study from "./pages/study.js";
import * as ensembles from "./pages/ensembles.js";

const PAGES = { runs, compare, studies, ensembles, plans, profiles, serving, cluster };
const INNER = { run: "runs", study: "studies", log: "serving" };
const VIEWS = { ...PAGES, run, study, log };
const PAUSE = 700;

// Everything that the lists show, by kind and id, and the runs that are ticked to be compared.
export const store = { stamp: 0, pending: 0, error: "", run: new Map(), study: new Map(), log: new Map(), chosen: new Set() };
const main = document.getElementById("main");
const status = document.getElementById("status");
let view = null;
let busy = false;
let again = false;

async function refresh() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    await pull();
    await view?.update();
    say(store.error ? `a look failed: ${store.error}` : store.pending > 1e6 ? `reading, ${bytes(store.pending)} left` : "live");
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    say("not connected");
  } finally {
    setTimeout(() => {
      busy = false;
      if (again) {
        again = false;
        refresh();
      }
    }, PAUSE);
  }
}

async function pull() {
  const found = await get("overview", { since: store.stamp });
  Object.assign(store, { stamp: found.stamp, pending: found.pending, error: found.error });
  const ids = new Set(found.ids);
  for (const [kind, list] of [["run", found.runs], ["study", found.studies], ["log", found.logs]]) {
    for (const one of list) store[kind].set(one.id, one);
    for (const id of store[kind].keys()) if (!ids.has(id)) store[kind].delete(id);
  }
}

function say(text) {
  if (status.textContent !== text) status.textContent = text;
}

async function show() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const name = Object.hasOwn(VIEWS, path) ? path : "runs";
  const ids = new URLSearchParams(query).getAll("id");
  forget();
  const host = h("div");
  const made = VIEWS[name].open(host, ids, store);
  view = made;
  fill(main, host);
  document.title = `${made.title} · manyhands`;
  for (const one of document.querySelectorAll("nav a")) {
    if (one.dataset.page === (INNER[name] ?? name)) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  try {
    if (!store.stamp) await pull();
    await made.update();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    console.warn(error);
    fill(host, empty("The dashboard does not answer."));
  }
}

function theme(wanted) {
  document.documentElement.dataset.theme = wanted;
  localStorage.setItem("theme", wanted);
  redraw();
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]), select, textarea")) {
    if (event.key === "Escape") {
      event.preventDefault();
      event.target.blur();
    }
    return;
  }
  const names = Object.keys(PAGES);
  if (event.key >= "1" && event.key <= String(names.length)) location.hash = `#/${names[Number(event.key) - 1]}`;
  else if (event.key === "/") {
    const filter = main.querySelector("input[type=search]");
    if (filter) {
      event.preventDefault();
      filter.focus();
    }
  } else if (event.key === "t") document.getElementById("theme").click();
  else if (event.key === "?") document.getElementById("keys").showModal();
  else if (event.key === "j" || event.key === "k") {
    const rows = [...main.querySelectorAll("tbody a")];
    const at = rows.indexOf(document.activeElement);
    rows[Math.min(rows.length - 1, Math.max(0, at + (event.key === "j" ? 1 : -1)))]?.focus();
  }
}

fill(document.getElementById("nav"), Object.entries(PAGES).map(([name, page]) => h("a", { href: `#/${name}`, "data-page": name }, page.title)));
document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
document.querySelector("a.skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.addEventListener("keydown", keys);
addEventListener("hashchange", show);
theme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
await show();
const news = new EventSource("/api/live");
news.onmessage = refresh;
news.onerror = () => say("not connected");
