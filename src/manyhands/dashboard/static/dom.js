// Elements and words. Everything that comes from a log becomes text, never markup.

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

// Replaces what an element holds, as a reader left it: focus and open details by data-key, tables scrolled as they were.
export function fill(host, ...children) {
  const key = host.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const opened = [...host.querySelectorAll("details[open] > summary[data-key]")].map((one) => one.dataset.key);
  const scrolled = [...host.querySelectorAll(".scroll[aria-label]")].filter((one) => one.scrollLeft).map((one) => [one.getAttribute("aria-label"), one.scrollLeft]);
  host.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  for (const one of opened) host.querySelector(`summary[data-key="${CSS.escape(one)}"]`)?.parentElement.setAttribute("open", "");
  for (const [label, left] of scrolled) host.querySelector(`.scroll[aria-label="${CSS.escape(label)}"]`)?.scrollTo({ left, behavior: "instant" });
  if (key !== undefined) host.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

// The heading of what follows, for those who hear a page; others see what it is.
export function unseen(text) {
  return h("h2", { class: "skip" }, text);
}

// What could not be read of a source, below its title.
export function unreadable(source) {
  return source.unreadable ? h("p", { class: "fault", role: "status" }, source.unreadable) : null;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(digits - 1);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 12 });
}

export function bytes(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log2(Math.max(1, value)) / 10)));
  return `${number(value / 1024 ** power, digits)} ${units[power]}`;
}

export function byteRate(value, digits = 3) {
  return `${bytes(value, digits)}/s`;
}

export function seconds(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${number(value * 1e6, digits)} µs`;
  if (value < 1) return `${number(value * 1e3, digits)} ms`;
  if (value < 120) return `${number(value, digits)} s`;
  if (value < 7200) return `${number(value / 60, digits)} min`;
  return `${number(value / 3600, digits)} h`;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function moment(t) {
  if (!t) return "–";
  const date = new Date(t * 1000);
  const pad = (part) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return `${day} ${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
}

export function value(one) {
  if (one === null || one === undefined) return "–";
  if (typeof one === "number") return number(one);
  return typeof one === "object" ? JSON.stringify(one) : String(one);
}

export function address(page, ids = []) {
  const query = [ids].flat().map((id) => `id=${encodeURIComponent(id)}`).join("&");
  return query ? `#/${page}?${query}` : `#/${page}`;
}

export function link(page, ids, ...children) {
  const href = address(page, ids);
  return h("a", { href, "data-key": href }, ...children);
}

export function facts(entries) {
  const shown = entries.filter(([, what]) => what !== null && what !== undefined && what !== "");
  return h("dl", { class: "facts" }, shown.map(([name, what]) => h("div", {}, h("dt", {}, name), h("dd", {}, what))));
}

// A table: columns are [title, cell(row), {num, wide, narrow}]; titles that can be sorted by have a key. `group` names the
// group of a row; rows of a group must follow each other.
export function table(label, columns, rows, { row = () => ({}), sort, onsort, group } = {}) {
  const heads = columns.map(([title, , how = {}]) => {
    const order = sort && sort[0] === how.key ? (sort[1] > 0 ? "ascending" : "descending") : null;
    const inner = how.key && onsort ? h("button", { type: "button", "data-key": `sort ${how.key}`, onclick: () => onsort(how.key) }, title, order === "ascending" ? " ▲" : order ? " ▼" : "") : title;
    return h("th", { scope: "col", class: how.num ? "num" : null, "aria-sort": order }, inner);
  });
  const isFirst = (place) => group && (!place || group(rows[place]) !== group(rows[place - 1]));
  const titled = (one) => h("tr", { class: "group" }, h("th", { scope: "rowgroup", colspan: columns.length }, group(one)));
  const body = rows.flatMap((one, place) => [isFirst(place) ? titled(one) : null, h("tr", row(one), columns.map(([, cell, how = {}]) => h("td", { class: ["num", "wide", "narrow"].find((name) => how[name]) }, cell(one))))]);
  return h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, h("table", {}, h("caption", { class: "skip" }, label), h("thead", {}, h("tr", {}, heads)), h("tbody", {}, body)));
}

export function state(text) {
  return h("span", { class: `state ${["running", "finished", "failed", "interrupted", "stopped", "serving"].includes(text) ? text : ""}` }, text);
}

export function empty(...text) {
  return h("p", { class: "empty" }, ...text);
}

// What a page of one thing shows where there is no such thing.
export function missing(noun, id, page) {
  return [h("h1", {}, id || "Nothing"), empty(`There is no ${noun} of this name in the folders that are shown. `, link(page, [], "Show all"))];
}

// What a pointer was put down on must still be there when it is lifted, or the click is lost: news wait as long.
let pressed = null;
const lift = () => setTimeout(() => {
  pressed?.resolve();
  pressed = null;
});
addEventListener("pointerdown", () => { pressed ??= Promise.withResolvers(); }, true);
addEventListener("pointerup", lift, true);
addEventListener("pointercancel", lift, true);
// Whoever opens a menu may never lift it, as far as a page is told.
addEventListener("contextmenu", lift, true);
addEventListener("blur", lift);

export async function get(path, query = {}) {
  const text = new URLSearchParams(query).toString();
  const answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`);
  const found = answer.ok ? await answer.json() : null;
  await pressed?.promise;
  return found;
}
