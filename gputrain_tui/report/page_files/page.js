"use strict";
// Draws a run's report from data alone. Text of a run is only ever set as text, never as markup.

const HEIGHT = 176, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;
const PARTS = ["data", "forward", "backward", "sync", "optimizer", "other"];
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
      text += `${pen}${px(spec.x[index]).toFixed(1)} ${py(value).toFixed(1)}`;
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
  for (const line of spec.lines) plot.append(draw("path", { class: line.thin ? "curve thin" : "curve", d: path(line.values) }));
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

function steps(data) {
  const charts = data.charts, count = charts.curves.length ? charts.curves[0].median.length : 0;
  const span = charts.last_step - charts.first_step + 1;
  return Array.from({ length: count }, (_, index) => Math.round(charts.first_step + ((index + 0.5) * span) / count - 0.5));
}

function stepCharts(data) {
  const { report, charts } = data, x = steps(data);
  const axis = { xName: "step", xText: (step) => Math.round(step).toLocaleString("en-US"), zoomable: true };
  const marks = report.findings.filter((each) => each.step !== null && each.severity !== "info").map((each) => ({ at: each.step, text: each.message }));
  const titles = { loss: "loss", step_ms: "step time", sync_exposed_ms: "wait for the gradient synchronisation" };
  const boxes = charts.curves.map((curve) => {
    const ranks = Object.entries(curve.ranks).map(([rank, list]) => ({ name: `rank ${rank}`, values: list, thin: true }));
    const chosen = ranks.filter((each) => each.name === `rank ${view.rank}`).map((each) => ({ ...each, thin: false }));
    const dots = curve.name === "loss" ? report.validations.filter((each) => each.loss !== null).map((each) => ({ at: each.step, value: each.loss, text: `${each.split}, step ${each.step}: ${each.loss}` })) : [];
    const lines = chosen.length ? chosen : [...ranks, { name: "median", values: curve.median }];
    return chart({ ...axis, title: titles[curve.name], unit: curve.unit, x, lines, band: { low: curve.low, high: curve.high }, marks, dots });
  });
  if (charts.blocks.length) {
    const middle = charts.blocks.map((each) => (each.first_step + Math.min(each.last_step, charts.last_step)) / 2);
    const part = (block, name) => { const found = block.parts.find((each) => each.name === name); return found ? found.ms : null; };
    const stacks = PARTS.map((name) => ({ name, values: charts.blocks.map((block) => part(block, name)) })).filter((each) => each.values.some((value) => value !== null));
    if (stacks.length) boxes.push(chart({ ...axis, title: "phases of a step", unit: "ms", x: middle, lines: [], stacks, marks }));
    boxes.push(chart({ ...axis, title: "throughput", unit: "samples/s", x: middle, lines: [{ name: "all ranks", values: charts.blocks.map((each) => each.samples_per_s) }], fromZero: true, marks }));
  }
  if (charts.lateness) boxes.push(lateness(charts));
  return boxes;
}

function metricChart(data) {
  const { charts } = data, curve = charts.metrics.find((each) => each.name === view.metric) || charts.metrics[0];
  const count = curve.median.length, span = charts.last_step - charts.first_step + 1;
  const x = curve.median.map((_, index) => Math.round(charts.first_step + ((index + 0.5) * span) / count - 0.5));
  const axis = { xName: "step", xText: (step) => Math.round(step).toLocaleString("en-US"), zoomable: true };
  return chart({ ...axis, title: curve.name, unit: curve.unit, x, lines: [{ name: "mean", values: curve.median }], band: { low: curve.low, high: curve.high } });
}

function metricTable(report) {
  return table(["metric", { right: "newest" }], Object.entries(report.metrics).slice(0, 256).map(([name, value]) => [name, { right: value === null ? "–" : String(Number(value.toPrecision(5))) }]));
}

// Ranks downwards, steps to the right; the darker, the later. A canvas, as it may have 60,000 cells.
function lateness(charts) {
  const { ranks, columns } = charts.lateness, cell = Math.max(2, Math.min(22, Math.floor(264 / ranks.length)));
  const canvas = make("canvas", { width: columns.length, height: ranks.length, class: "plot", tabindex: "0", role: "img", "aria-label": "lateness of each rank over the steps; arrow keys read the values" });
  canvas.style.height = `${Math.max(cell * ranks.length, 40)}px`;
  canvas.style.imageRendering = "pixelated";
  const output = make("output", {}), most = Math.max(...finite(columns), 1e-9);
  const pen = canvas.getContext("2d"), dark = matchMedia("(prefers-color-scheme: dark)").matches;
  columns.forEach((column, x) => column.forEach((late, y) => {
    if (late === null) return;
    pen.fillStyle = dark ? `rgba(255, 138, 128, ${0.06 + (0.94 * late) / most})` : `rgba(180, 35, 24, ${0.05 + (0.95 * late) / most})`;
    pen.fillRect(x, y, 1, 1);
  }));
  const place = [columns.length - 1, 0];
  const read = (x, y) => {
    place[0] = Math.min(Math.max(x, 0), columns.length - 1);
    place[1] = Math.min(Math.max(y, 0), ranks.length - 1);
    const span = charts.last_step - charts.first_step + 1, step = Math.round(charts.first_step + ((place[0] + 0.5) * span) / columns.length - 0.5);
    output.textContent = `step ${step.toLocaleString("en-US")}: rank ${ranks[place[1]]} ${precise(columns[place[0]][place[1]])} ms late`;
  };
  canvas.addEventListener("pointermove", (event) => {
    const area = canvas.getBoundingClientRect();
    read(Math.floor(((event.clientX - area.left) / area.width) * columns.length), Math.floor(((event.clientY - area.top) / area.height) * ranks.length));
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in moves) { read(place[0] + moves[event.key][0], place[1] + moves[event.key][1]); event.preventDefault(); }
  });
  const mean = ranks.map((rank, y) => { const list = finite(columns.map((column) => column[y])); return list.length ? list.reduce((a, b) => a + b, 0) / list.length : null; });
  const details = make("details", {}, make("summary", {}, "table of values"), table(["rank", { right: "mean ms late" }], ranks.slice(0, 300).map((rank, y) => [`rank ${rank}`, { right: number(mean[y], 2) }])));
  const box = make("figure", { class: "chart", "data-chart": "lateness" }, make("h3", {}, `lateness of the ranks, ms (darkest: ${number(most, 1)})`), output, canvas, details);
  box.style.margin = "0";
  return box;
}

function hardwareCharts(data) {
  const { charts, report } = data, begin = charts.begin;
  if (begin === null || charts.end === null) return [];
  const start = report.started === null ? begin : report.started;
  return charts.hardware.filter((line) => !view.host || line.host === view.host).filter((line) => finite(line.values).length > 1).slice(0, 48).map((line) => {
    const count = line.values.length, x = line.values.map((_, index) => begin - start + ((index + 0.5) * (charts.end - begin)) / count);
    const [quantity, unit] = [line.quantity.slice(0, line.quantity.lastIndexOf(" ")), line.quantity.slice(line.quantity.lastIndexOf(" ") + 1)];
    const of = line.gpu === null ? line.host : `${line.host} GPU ${line.gpu}`;
    return chart({ title: `${of} ${quantity}`, unit, x, xName: "after", xText: seconds, lines: [{ name: quantity, values: line.values }], fromZero: true, limit: quantity === "use" ? 100 : null });
  });
}

function partTable(report) {
  const rows = report.parts.map((part) => {
    const bar = make("span", { class: `bar ${part.name}` });
    bar.style.width = `${(part.share * 12).toFixed(2)}rem`;
    return [NAMES[part.name] || part.name, { right: number(part.ms, 2) }, { right: percent(part.share) }, bar];
  });
  return table(["part", { right: "ms" }, { right: "share" }, ""], rows);
}

function rankTable(report) {
  const ranks = report.ranks.filter((each) => (view.rank === "" || String(each.rank) === view.rank) && (!view.host || each.host === view.host));
  const latest = [...ranks].sort((a, b) => (b.late_ms || 0) - (a.late_ms || 0)).slice(0, 64).sort((a, b) => a.rank - b.rank);
  const share = (rank, ...names) => { const found = rank.parts.filter((part) => names.includes(part.name)); return found.length ? percent(found.reduce((sum, part) => sum + part.share, 0)) : "–"; };
  const rows = latest.map((rank) => [
    { right: String(rank.rank) }, rank.host || "", rank.device || "", rank.outcome || "", { right: number(rank.steps, 0) }, { right: number(rank.loss, 4) }, { right: number(rank.step_ms) }, { right: number(rank.late_ms) },
    { right: share(rank, "data") }, { right: share(rank, "forward", "backward") }, { right: share(rank, "sync") }, { right: share(rank, "optimizer") }, { right: bytes(rank.memory_peak_bytes) }, rank.findings.map((kind) => kind.replaceAll("_", " ")).join(", "),
  ]);
  const right = (...titles) => titles.map((title) => ({ right: title }));
  const box = table([...right("rank"), "host", "device", "end", ...right("steps", "loss", "step ms", "late ms", "data", "compute", "sync", "optimizer", "peak memory"), "findings"], rows);
  if (ranks.length > latest.length) box.append(make("p", { class: "faint" }, `… and ${ranks.length - latest.length} ranks that were less late`));
  return box;
}

function findingTable(report) {
  const rows = report.findings.filter((each) => each.severity !== "info" && (view.rank === "" || each.rank === null || String(each.rank) === view.rank)).slice(0, 200).map((each) => {
    const stands = each.cleared === null;
    const when = each.step !== null ? `step ${number(each.step, 0)} ${stands ? "to the end" : each.cleared_step === null ? "on, cleared" : "to " + number(each.cleared_step, 0)}` : report.started === null ? "" : `after ${seconds(each.time - report.started)}`;
    const text = make("span", {}, make("span", stands ? { class: "alarm" } : {}, each.message), each.advice && stands ? make("p", { class: "faint" }, "→ " + each.advice) : "");
    return [when, each.kind.replaceAll("_", " "), text];
  });
  const box = table(["when", "kind", "what"], rows);
  box.querySelectorAll("td:nth-child(3)").forEach((cell) => { cell.className = "text"; });
  return box;
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

// Shows a report and its charts; called again with newer data, it keeps zoom and choices.
function show(data) {
  shown = data;
  WIDTH = Math.max(260, Math.min(640, document.documentElement.clientWidth - 54)); // texts keep their shape
  const { report } = data;
  const facts = [report.state, report.duration_s === null ? "" : seconds(report.duration_s), `${number(report.step, 0)} steps`, `${report.world_size} rank${report.world_size === 1 ? "" : "s"}`, report.samples_per_s === null ? "" : `${number(report.samples_per_s)} samples/s`, report.loss === null ? "" : `loss ${number(report.loss, 4)} ${report.loss_unit}`];
  const ranks = report.ranks.slice(0, 1024).map((each) => String(each.rank)), hosts = [...new Set(report.ranks.map((each) => each.host).filter(Boolean))];
  const main = make("main", {},
    make("h1", {}, report.id), make("p", { class: "faint" }, facts.filter(Boolean).join(" · ")),
    make("div", { class: report.verdict.is_problem ? "verdict bad" : "verdict" }, make("strong", {}, report.verdict.text), report.verdict.advice ? make("span", {}, "→ " + report.verdict.advice) : ""),
    report.record_gap ? make("p", { class: "alarm" }, "the record is not whole: " + report.record_gap) : "",
    ...report.attempts.map((text) => make("p", { class: "faint" }, text)));
  if (report.parts.length) main.append(section("Where a step's time goes", partTable(report)));
  main.append(make("div", { class: "controls" }, choice("rank", ranks, view.rank, (value) => { view.rank = value; }), choice("host", hosts, view.host, (value) => { view.host = value; }), make("span", { class: "faint" }, "drag to zoom, double click or Esc for all")));
  main.append(section("Over the steps", make("div", { class: "charts" }, ...stepCharts(data))));
  if (data.charts.metrics.length) {
    const names = data.charts.metrics.map((each) => each.name), first = names.includes(view.metric) ? view.metric : names[0];
    main.append(section("Its own metrics", make("div", { class: "controls" }, choice("metric", names, first, (value) => { view.metric = value; }, false)), make("div", { class: "charts" }, metricChart(data), metricTable(report))));
  }
  if (report.findings.some((each) => each.severity !== "info")) main.append(section("What was found, and when", findingTable(report)));
  main.append(section("Ranks", rankTable(report)));
  const hardware = hardwareCharts(data);
  if (hardware.length) main.append(section("Hardware", make("div", { class: "charts" }, ...hardware)));
  if (report.software.length) main.append(section("Software", ...report.software.map((each) => make("p", {}, (report.software.length > 1 ? each.hosts.join(", ") + ": " : "") + Object.entries(each.versions).map((pair) => pair.join(" ")).join(", ")))));
  if (report.previous_run) main.append(section(`Recipe, compared with ${report.previous_run}`, report.changes.length ? table(["key", "before", "now"], report.changes.slice(0, 200).map((each) => [each.key, each.before || "–", each.now || "–"])) : make("p", {}, "the same")));
  main.append(make("p", { class: "faint" }, report.run_dir));
  document.title = report.id;
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
show(JSON.parse(document.getElementById("data").textContent));
