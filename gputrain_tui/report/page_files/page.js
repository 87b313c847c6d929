"use strict";
// Draws a run's report from data alone.

const PARTS = ["data", "forward", "backward", "sync", "optimizer", "other"];
function steps(data) {
  const charts = data.charts, count = charts.curves.length ? charts.curves[0].middle.length : 0;
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
    const lines = chosen.length ? chosen : [...ranks, { name: curve.name === "loss" ? "mean" : "median", values: curve.middle }];
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
  const count = curve.middle.length, span = charts.last_step - charts.first_step + 1;
  const x = curve.middle.map((_, index) => Math.round(charts.first_step + ((index + 0.5) * span) / count - 0.5));
  const axis = { xName: "step", xText: (step) => Math.round(step).toLocaleString("en-US"), zoomable: true };
  return chart({ ...axis, title: curve.name, unit: curve.unit, x, lines: [{ name: "mean", values: curve.middle }], band: { low: curve.low, high: curve.high } });
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
  const balanced = report.shares.length > 0;
  const rows = latest.map((rank) => [
    { right: String(rank.rank) }, rank.host || "", rank.device || "", rank.outcome || "", { right: number(rank.steps, 0) }, ...(balanced ? [{ right: number(rank.share, 0) }] : []), { right: number(rank.loss, 4) }, { right: number(rank.samples_per_s) }, { right: number(rank.step_ms) }, { right: number(rank.late_ms) },
    { right: share(rank, "data") }, { right: share(rank, "forward", "backward") }, { right: share(rank, "sync") }, { right: share(rank, "optimizer") }, { right: bytes(rank.memory_peak_bytes) }, rank.findings.map((kind) => kind.replaceAll("_", " ")).join(", "),
  ]);
  const right = (...titles) => titles.map((title) => ({ right: title }));
  const box = table([...right("rank"), "host", "device", "end", ...right("steps", ...(balanced ? ["share"] : []), "loss", "samples/s", "step ms", "late ms", "data", "compute", "sync", "optimizer", "peak memory"), "findings"], rows);
  if (ranks.length > latest.length) box.append(make("p", { class: "faint" }, `… and ${ranks.length - latest.length} ranks that were less late`));
  return box;
}

// What the run has reached: its newest validation and test, whether its ranks agree, and the changes of their shares.
function results(report) {
  const lines = ["valid", "test"].flatMap((split) => report.validations.filter((each) => each.split === split).slice(-1)).map((each) => {
    const metrics = Object.entries(each.metrics).slice(0, 16).map(([name, value]) => `${name} ${number(value, 4)}`);
    return [each.split, `step ${each.step.toLocaleString("en-US")}: loss ${number(each.loss, 4)}`, ...metrics].join("  ");
  });
  if (report.parameters_equal !== null) lines.push(report.parameters_equal ? "parameters equal on all ranks" : "parameters DIFFER between ranks");
  lines.push(...report.shares.slice(-8).map((each) => each.text));
  return make("div", {}, ...lines.map((text) => make("p", {}, text)));
}

function findingTable(report) {
  const rows = report.findings.filter((each) => each.severity !== "info" && (view.rank === "" || each.rank === null || String(each.rank) === view.rank)).slice(0, 200).map((each) => {
    const stands = each.cleared === null;
    const when = each.step !== null ? `step ${number(each.step, 0)} ${stands ? "to the end" : each.over_with !== null ? "to the end of " + each.over_with : each.cleared_step === null ? "on, cleared" : "to " + number(each.cleared_step, 0)}` : report.started === null ? "" : `after ${seconds(each.time - report.started)}`;
    const text = make("span", {}, make("span", stands ? { class: "alarm" } : {}, each.message), each.advice && stands ? make("p", { class: "faint" }, "→ " + each.advice) : "");
    return [when, each.kind.replaceAll("_", " "), text];
  });
  const box = table(["when", "kind", "what"], rows);
  box.querySelectorAll("td:nth-child(3)").forEach((cell) => { cell.className = "text"; });
  return box;
}

function hostTable(report) {
  const rows = report.hosts.filter((each) => !view.host || each.host === view.host).slice(0, 64).map((each) => [
    each.host, { right: each.cores === null ? "–" : String(each.cores) }, { right: bytes(each.memory_total_bytes) }, { right: String(each.gpus.length) },
    Object.entries(each.versions).map(([name, version]) => `${name} ${version}`).join(", "),
  ]);
  return table(["host", { right: "cores" }, { right: "memory" }, { right: "GPUs" }, "versions"], rows);
}

// Shows a report and its charts; called again with newer data, it keeps zoom and choices.
function show(data) {
  shown = data;
  WIDTH = Math.max(260, Math.min(640, document.documentElement.clientWidth - 54)); // texts keep their shape
  const { report } = data;
  const facts = [report.state, report.duration_s === null ? "" : seconds(report.duration_s), `${number(report.step ?? 0, 0)} steps`, `${report.world_size} rank${report.world_size === 1 ? "" : "s"}`, report.samples_per_s === null ? "" : `${number(report.samples_per_s)} samples/s`, report.loss === null ? "" : `loss ${number(report.loss, 4)} ${report.loss_unit}`];
  const ranks = report.ranks.slice(0, 1024).map((each) => String(each.rank)), hosts = [...new Set(report.ranks.map((each) => each.host).filter(Boolean))];
  const main = make("main", {},
    make("h1", {}, report.id), make("p", { class: "faint" }, facts.filter(Boolean).join(" · ")),
    make("div", { class: report.verdict.is_problem ? "verdict bad" : "verdict" }, make("strong", {}, report.verdict.text), report.verdict.advice ? make("span", {}, "→ " + report.verdict.advice) : ""),
    report.record_gap ? make("p", { class: "alarm" }, "the record is not whole: " + report.record_gap) : "",
    ...report.attempts.map((text) => make("p", { class: "faint" }, text)));
  if (report.parts.length) main.append(section("Where a step's time goes", make("p", { class: "faint" }, `means over ${report.means_over}, gputrain compare leaves the first tenth out`), partTable(report)));
  main.append(make("div", { class: "controls" }, choice("rank", ranks, view.rank, (value) => { view.rank = value; }), choice("host", hosts, view.host, (value) => { view.host = value; }), make("span", { class: "faint" }, "drag to zoom, double click or Esc for all")));
  main.append(section("Over the steps", make("div", { class: "charts" }, ...stepCharts(data))));
  if (data.charts.metrics.length) {
    const names = data.charts.metrics.map((each) => each.name), first = names.includes(view.metric) ? view.metric : names[0];
    main.append(section("Metrics", make("div", { class: "controls" }, choice("metric", names, first, (value) => { view.metric = value; }, false)), make("div", { class: "charts" }, metricChart(data), metricTable(report))));
  }
  if (report.findings.some((each) => each.severity !== "info")) main.append(section("What was found, and when", findingTable(report)));
  main.append(section("Ranks and results", rankTable(report), results(report)));
  const hardware = hardwareCharts(data);
  if (report.hosts.length) main.append(section("Hardware and versions", hostTable(report), make("div", { class: "charts" }, ...hardware)));
  if (report.previous_run) main.append(section(`Recipe, compared with ${report.previous_run}`, report.changes.length ? table(["key", "before", "now"], report.changes.slice(0, 200).map((each) => [each.key, each.before || "–", each.now || "–"])) : make("p", {}, "the same")));
  main.append(make("p", { class: "faint" }, report.run_dir));
  document.title = report.id;
  replaceMain(main);
}

show(JSON.parse(document.getElementById("data").textContent));
