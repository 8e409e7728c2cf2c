// The columns of a table that a reader has chosen, kept for next time. A menu lists them.
import { fill, h } from "./dom.js";

export class Columns {
  // `name` is that of the stored choice: the columns that differ from what is shown by default.
  constructor(name, onchange) {
    Object.assign(this, { name, onchange, listed: "" });
    this.changed = new Set(stored(name));
    this.menu = h("ul");
    this.node = h("details", { class: "menu", onkeydown: (event) => {
      if (event.key !== "Escape" || !this.node.open) return;
      this.node.open = false;
      this.node.querySelector("summary").focus();
    } }, h("summary", {}, "Columns"), this.menu);
    const away = (event) => {
      if (!this.node.isConnected) removeEventListener("click", away);
      else if (!this.node.contains(event.target)) this.node.open = false;
    };
    addEventListener("click", away);
  }

  // Of all columns, as `table` takes them, those to show; {fixed} ones always are, {extra} ones if they were chosen.
  shown(columns) {
    const keys = columns.map(([title, , how = {}]) => how.key ?? title);
    const is = (place) => Boolean(columns[place][2]?.fixed || Boolean(columns[place][2]?.extra) === this.changed.has(keys[place]));
    this.#list(columns, keys, is);
    return columns.filter((_, place) => is(place));
  }

  #list(columns, keys, is) {
    if (this.listed === keys.join("\n")) return;
    this.listed = keys.join("\n");
    fill(this.menu, columns.map(([title, , how = {}], place) => {
      if (how.fixed) return null;
      return h("li", {}, h("label", {}, h("input", { type: "checkbox", "data-key": `column ${keys[place]}`, checked: is(place), onchange: () => this.#change(keys[place]) }), ` ${title}`));
    }));
  }

  #change(key) {
    if (!this.changed.delete(key)) this.changed.add(key);
    localStorage.setItem(this.name, JSON.stringify([...this.changed]));
    this.onchange();
  }
}

function stored(name) {
  try {
    const found = JSON.parse(localStorage.getItem(name) ?? "[]");
    return Array.isArray(found) ? found.map(String) : [];
  } catch {
    return [];
  }
}
