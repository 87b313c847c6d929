"use strict";
// Charts and tables of a page whose script defines show(data). Text of a run is only ever set as text, never as markup.

const HEIGHT = 176, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;
const NAMES = { data: "data and copies", sync: "exposed synchronisation", other: "outside of all phases" };
const view = { zoom: null, rank: "", host: "", metric: "", cursor: null, isDragging: false };
let shown = null;
let WIDTH = 640;

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

function draw(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function number(value, digits = 1) {
  if (value === null || value === undefined) return "–";
  const fixed = Math.abs(value) >= 1000 ? 0 : digits;
  return value.toLocaleString("en-US", { minimumFractionDigits: fixed, maximumFractionDigits: fixed });
}

function precise(value) {
  return value === null || value === undefined ? "–" : String(value);
}

function percent(share) {
  return share === null || share === undefined ? "–" : (100 * share).toFixed(1) + "%";
}

function seconds(value) {
  if (value === null || value === undefined) return "";
  const whole = Math.max(0, Math.floor(value)), hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60, rest = String(whole % 60).padStart(2, "0");
  if (whole < 60) return whole + " s";
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

function bytes(count) {
  return count === null || count === undefined ? "–" : (count / 2 ** 30).toFixed(1) + " GiB";
}

function table(titles, rows) {
  const cell = (tag, value) => {
    const right = typeof value === "object" && value !== null && "right" in value;
    return make(tag, right ? { class: "number" } : {}, right ? value.right : value);
  };
  const head = make("tr", {}, ...titles.map((title) => cell("th", title)));
  const body = rows.map((row) => make("tr", {}, ...row.map((value) => (value instanceof Node ? make("td", {}, value) : cell("td", value)))));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function ticks(low, high) {
  const rough = (high - low) / 5 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

function finite(lists) {
  return lists.flat().filter((value) => value !== null && value !== undefined);
}

// A chart over x: {title, unit, x, lines, band, stacks, marks, dots, fromZero, xText, zoomable}. Its readout has the
// value of every line at the cursor; arrow keys move it.
function chart(spec) {
  const output = make("output", {});
  const label = spec.title + (spec.unit ? `, ${spec.unit}` : "");
  const plot = draw("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", tabindex: "0", role: "img", "aria-label": `${label}; arrow keys read the values` });
  const box = make("figure", { class: "chart", "data-chart": spec.title }, make("h3", {}, label), output, plot, values(spec));
  box.style.margin = "0";
  let range = [spec.x[0], spec.x[spec.x.length - 1]];
  if (spec.zoomable && view.zoom) range = view.zoom;
  if (range[0] === range[1]) range = [range[0] - 0.5, range[1] + 0.5];
  const inside = spec.x.map((at, index) => index).filter((index) => spec.x[index] >= range[0] && spec.x[index] <= range[1]);
  const pick = (list) => inside.map((index) => list[index]);
  const stacked = spec.stacks ? inside.map((index) => spec.stacks.reduce((sum, each) => sum + (each.values[index] || 0), 0)) : [];
  const known = finite([...spec.lines.map((each) => pick(each.values)), ...(spec.band ? [pick(spec.band.low), pick(spec.band.high)] : []), stacked, (spec.dots || []).map((each) => each.value)]);
  if (!known.length) {
    output.textContent = "nothing was measured";
    return box;
  }
  let low = Math.min(...known), high = Math.max(...known);
  if (spec.fromZero || spec.stacks) low = Math.min(low, 0);
  if (spec.limit) high = Math.max(high, spec.limit);
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const px = (at) => LEFT + ((at - range[0]) / (range[1] - range[0])) * (WIDTH - LEFT - RIGHT);
  const py = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  for (const tick of ticks(low, high)) {
    plot.append(draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(tick), y2: py(tick) }));
    plot.append(draw("text", { x: LEFT - 5, y: py(tick) + 4, "text-anchor": "end" }, number(tick, high - low < 1 ? 3 : high - low < 20 ? 1 : 0)));
  }
  for (const tick of ticks(range[0], range[1]).slice(0, 6)) {
    plot.append(draw("text", { x: px(tick), y: HEIGHT - 5, "text-anchor": tick === range[0] ? "start" : "middle" }, spec.xText(tick)));
  }
  const path = (list) => {
    let text = "", pen = "M";
    for (const index of inside) {
      const value = list[index];
      if (value === null || value === undefined) { pen = "M"; continue; }
      text += `${pen}${px(spec.x[index]).toFixed(1)} ${py(value).toFixed(1)}${pen === "M" ? "h0" : ""}`; // h0: a point alone is a dot
      pen = "L";
    }
    return text;
  };
  if (spec.band) {
    const there = inside.filter((index) => spec.band.low[index] !== null && spec.band.high[index] !== null);
    const point = (index, list) => `${px(spec.x[index]).toFixed(1)} ${py(list[index]).toFixed(1)}`;
    const outline = [...there.map((index) => point(index, spec.band.high)), ...there.reverse().map((index) => point(index, spec.band.low))];
    plot.append(draw("path", { class: "band", d: outline.length ? "M" + outline.join("L") + "Z" : "" }));
  }
  if (spec.stacks) {
    const below = spec.x.map(() => 0);
    for (const each of spec.stacks) {
      const top = below.map((base, index) => base + (each.values[index] || 0));
      const outline = [...inside.map((index) => [index, top]), ...[...inside].reverse().map((index) => [index, [...below]])];
      plot.append(draw("path", { class: each.name, d: "M" + outline.map(([index, list]) => `${px(spec.x[index]).toFixed(1)} ${py(list[index]).toFixed(1)}`).join("L") + "Z" }));
      top.forEach((value, index) => { below[index] = value; });
    }
  }
  for (const line of spec.lines) plot.append(draw("path", { class: `curve ${line.thin ? "thin" : line.style || ""}`, d: path(line.values) }));
  for (const mark of spec.marks || []) {
    if (mark.at < range[0] || mark.at > range[1]) continue;
    const line = draw("line", { class: "mark", x1: px(mark.at), x2: px(mark.at), y1: TOP, y2: HEIGHT - BOTTOM });
    line.append(draw("title", {}, mark.text));
    plot.append(line);
  }
  for (const dot of spec.dots || []) {
    if (dot.at < range[0] || dot.at > range[1]) continue;
    const point = draw("ellipse", { class: "dot", cx: px(dot.at), cy: py(dot.value), rx: 3.5, ry: 3.5 });
    point.append(draw("title", {}, dot.text));
    plot.append(point);
  }
  const cursor = draw("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const zoom = draw("rect", { class: "zoom", y: TOP, height: HEIGHT - TOP - BOTTOM, visibility: "hidden" });
  plot.append(zoom, cursor);
  let at = inside.length - 1, from = null;
  const read = (index) => {
    at = Math.min(Math.max(index, 0), inside.length - 1);
    const point = inside[at], x = px(spec.x[point]);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    view.cursor = { chart: spec.title, x: spec.x[point] };
    const texts = [...(spec.stacks || []), ...spec.lines.filter((line) => !line.thin)].map((each) => `${NAMES[each.name] || each.name} ${precise(each.values[point])}`);
    if (spec.band) texts.push(`${precise(spec.band.low[point])} to ${precise(spec.band.high[point])} over the ranks`);
    output.textContent = `${spec.xName} ${spec.xText(spec.x[point])}: ${texts.join(", ")}`;
  };
  const column = (event) => {
    const area = plot.getBoundingClientRect();
    return range[0] + ((((event.clientX - area.left) / area.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)) * (range[1] - range[0]);
  };
  const closest = (x) => inside.reduce((best, index, place) => (Math.abs(spec.x[index] - x) < Math.abs(spec.x[inside[best]] - x) ? place : best), 0);
  plot.addEventListener("pointermove", (event) => {
    read(closest(column(event)));
    if (from === null) return;
    const [left, right] = [from, column(event)].map(px).sort((a, b) => a - b);
    zoom.setAttribute("x", left);
    zoom.setAttribute("width", Math.max(right - left, 0));
    zoom.setAttribute("visibility", "visible");
  });
  plot.addEventListener("pointerdown", (event) => {
    from = spec.zoomable ? column(event) : null;
    view.isDragging = from !== null;
  });
  plot.addEventListener("pointerup", (event) => {
    view.isDragging = false;
    if (from === null) return;
    const [left, right] = [from, column(event)].sort((a, b) => a - b);
    from = null;
    zoom.setAttribute("visibility", "hidden");
    if (right - left > (range[1] - range[0]) / 50) setZoom([left, right]);
  });
  plot.addEventListener("dblclick", () => setZoom(null));
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: inside.length - 1 };
    if (event.key in moves) { read(moves[event.key]); event.preventDefault(); }
    if (event.key === "Escape") setZoom(null);
  });
  if (view.cursor && view.cursor.chart === spec.title && inside.length) read(closest(view.cursor.x));
  return box;
}

function values(spec) {
  const details = make("details", {}, make("summary", {}, "table of values"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    const every = Math.max(1, Math.ceil(spec.x.length / 300));
    const lines = [...(spec.stacks || []), ...spec.lines];
    if (spec.band) lines.push({ name: "lowest", values: spec.band.low }, { name: "highest", values: spec.band.high });
    const rows = spec.x.map((at, index) => [spec.xText(at), ...lines.map((each) => ({ right: precise(each.values[index]) }))]);
    details.append(table([spec.xName, ...lines.map((each) => ({ right: NAMES[each.name] || each.name }))], rows.filter((_, index) => index % every === 0)));
  });
  return details;
}

function setZoom(range) {
  view.zoom = range;
  show(shown);
}

function choice(label, options, current, choose, all = true) {
  const select = make("select", { "aria-label": label }, all ? make("option", { value: "" }, "all") : null, ...options.map((value) => make("option", { value }, value)));
  select.value = options.includes(current) ? current : "";
  select.addEventListener("change", () => { choose(select.value); show(shown); });
  return make("label", {}, label + " ", select);
}

function section(title, ...children) {
  return make("section", {}, make("h2", {}, title), ...children);
}

// Puts a page in place of the one before, with the opened tables and the focus where they were.
function replaceMain(main) {
  const before = document.querySelector("main"), focused = document.activeElement && document.activeElement.closest("[data-chart]");
  const opened = [...before.querySelectorAll("[data-chart] details[open]")].map((each) => each.closest("[data-chart]").dataset.chart);
  before.replaceWith(main);
  for (const box of main.querySelectorAll("[data-chart]")) {
    if (opened.includes(box.dataset.chart)) box.querySelector("details").open = true;
    if (focused && box.dataset.chart === focused.dataset.chart) box.querySelector(".plot").focus({ preventScroll: true });
  }
}

let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => show(shown), 100);
});
