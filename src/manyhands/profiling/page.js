"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const box = document.getElementById("timeline"), tip = document.getElementById("tip"), find = document.getElementById("find");
  const SVG = "http://www.w3.org/2000/svg", ROW = 16, WIDTH = box.clientWidth || 1000;
  // Bars that lie within others of their track are drawn below them.
  let height = 4, end = 1;
  for (const track of data.tracks) {
    const open = [];
    let depth = 0;
    track.bars.sort((a, b) => a[1] - b[1] || b[2] - a[2]);
    for (const bar of track.bars) {
      while (open.length && open[open.length - 1] <= bar[1] + 0.05) open.pop();
      bar.push(open.length);
      open.push(bar[2]);
      depth = Math.max(depth, open.length);
      end = Math.max(end, bar[2]);
    }
    track.top = height + ROW;
    height = track.top + depth * ROW + 8;
  }
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("width", WIDTH);
  svg.setAttribute("height", height);
  box.append(svg);
  let from = 0, span = end, wanted = "";
  const time = (us) => {
    const [unit, scale] = us >= 999.5e3 ? ["s", 1e6] : us >= 999.5 ? ["ms", 1e3] : ["µs", 1];
    return `${Number((us / scale).toPrecision(3))} ${unit}`;
  };
  const hue = (name) => {
    let hash = 0;
    for (const letter of name) hash = (hash * 31 + letter.charCodeAt(0)) % 360;
    return `hsl(${hash} 45% 62%)`;
  };
  const add = (kind, attributes, text) => {
    const node = document.createElementNS(SVG, kind);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text) node.textContent = text;
    svg.append(node);
  };
  const draw = () => {
    svg.replaceChildren();
    const scale = WIDTH / span;
    for (const track of data.tracks) {
      add("text", { x: 4, y: track.top - 4, fill: "#555" }, track.name);
      for (const [which, start, stop, depth] of track.bars) {
        const width = (stop - start) * scale, x = (start - from) * scale;
        if (x + width < 0 || x > WIDTH || width < 0.3) continue;
        const name = data.names[which], y = track.top + depth * ROW;
        const faded = wanted && !name.toLowerCase().includes(wanted);
        add("rect", { x, y, width: Math.max(width, 0.5), height: ROW - 2, fill: data.colours[name] || hue(name), opacity: faded ? 0.2 : 1, "data-hint": name + ": " + time(stop - start) });
        if (width > 7 * name.length + 6) add("text", { x: Math.max(x, 0) + 3, y: y + 11 }, name);
      }
    }
  };
  box.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = from + (span * event.offsetX) / WIDTH, factor = event.deltaY > 0 ? 1.25 : 0.8;
    span = Math.min(end, Math.max(1, span * factor));
    from = Math.min(Math.max(0, at - (span * event.offsetX) / WIDTH), end - span);
    draw();
  }, { passive: false });
  let held = null;
  box.addEventListener("mousedown", (event) => { held = [event.clientX, from]; });
  window.addEventListener("mouseup", () => { held = null; });
  window.addEventListener("mousemove", (event) => {
    const hint = event.target.getAttribute && event.target.getAttribute("data-hint");
    tip.style.display = hint ? "block" : "none";
    if (hint) {
      tip.textContent = hint;
      tip.style.left = event.clientX + 12 + "px";
      tip.style.top = event.clientY + 12 + "px";
    }
    if (!held) return;
    from = Math.min(Math.max(0, held[1] - ((event.clientX - held[0]) * span) / WIDTH), end - span);
    draw();
  });
  find.addEventListener("input", () => { wanted = find.value.toLowerCase(); draw(); });
  draw();
})();
