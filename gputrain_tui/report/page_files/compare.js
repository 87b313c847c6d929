"use strict";
// Draws a comparison of runs from data alone.

const AXES = { steps: ["step", "step"], samples: ["samples", "sample"], time: ["seconds", "after"] };
const COLOURS = 8; // of the style sheet, which begin anew after the last
const POINTS = 240;

// The value of a line at a place, between the two nearest points; null outside of them and in gaps.
function between(x, values, at) {
  let right = x.findIndex((each) => each >= at);
  if (right < 0) return null;
  if (x[right] === at) return values[right];
  if (!right || values[right] === null || values[right - 1] === null) return null;
  const share = (at - x[right - 1]) / (x[right] - x[right - 1]);
  return Number((values[right - 1] + share * (values[right] - values[right - 1])).toPrecision(5));
}

function overlay(data, title, unit, field, fromZero) {
  const [of, xName] = AXES[view.axis || "steps"];
  const runs = data.runs.map((run, index) => ({ run, index })).filter(({ run }) => run.curve[of].length);
  const last = Math.max(...runs.map(({ run }) => run.curve[of][run.curve[of].length - 1])), first = Math.min(...runs.map(({ run }) => run.curve[of][0]));
  const x = Array.from({ length: POINTS }, (_, index) => first + (index * (last - first)) / (POINTS - 1));
  const lines = runs.map(({ run, index }) => ({ name: run.id, values: x.map((at) => between(run.curve[of], run.curve[field], at)), style: `run${index % COLOURS}` }));
  const xText = of === "seconds" ? seconds : (at) => Math.round(at).toLocaleString("en-US");
  return chart({ title, unit, x, xName, xText, zoomable: true, lines, fromZero });
}

// The change with its interval around nothing; all relative figures have one scale, which ends at half as much again.
function changeBar(difference, most) {
  const [width, height] = [180, 14], px = (value) => width / 2 + (Math.max(-most, Math.min(most, value)) / most) * (width / 2 - 4);
  const plot = draw("svg", { class: "change", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  plot.append(draw("line", { class: "grid", x1: width / 2, x2: width / 2, y1: 0, y2: height }));
  const beyond = difference.beyond_noise ? " beyond" : "";
  if (difference.interval) {
    const [low, high] = difference.interval.map(px);
    plot.append(draw("rect", { class: "interval" + beyond, x: low, width: Math.max(high - low, 2), y: 5, height: 4 }));
  }
  if (difference.change !== null) plot.append(draw("circle", { class: "point" + beyond, cx: px(difference.change), cy: 7, r: 3.5 }));
  return plot;
}

function figureTable(data, index) {
  const shown = data.comparison.figures.slice(0, 300).map((figure, at) => ({ figure, difference: figure.differences[index], title: data.titles[at], change: data.changes[at][index] }));
  const most = Math.min(0.5, Math.max(0.05, ...finite(shown.filter(({ figure }) => figure.relative).map(({ difference }) => [difference.change, ...(difference.interval || [])]).flat()).map(Math.abs)));
  const value = (figure, at) => (figure.unit === "bytes" ? bytes(at) : number(at, figure.relative ? 2 : 4));
  const rows = shown.map(({ figure, difference, title, change }) => [
    title, change, figure.relative ? changeBar(difference, most) : "", difference.is_noise ? "noise" : "",
    { right: value(figure, difference.before) }, { right: value(figure, difference.now) },
  ]);
  return table(["figure", "change (95 %)", "", "", { right: "before" }, { right: "now" }], rows);
}

function phaseTable(data) {
  const total = (run) => run.parts.reduce((sum, part) => sum + part.ms, 0), most = Math.max(...data.runs.map(total), 1e-9);
  const rows = data.runs.filter((run) => run.parts.length).map((run) => {
    const bars = make("span", {}, ...run.parts.map((part) => { const bar = make("span", { class: `bar ${part.name}`, title: `${NAMES[part.name] || part.name} ${number(part.ms)} ms` }); bar.style.width = `calc(${part.ms / most} * min(18rem, 40vw))`; return bar; }));
    return [run.id, { right: number(total(run)) }, bars, run.parts.map((part) => `${part.name} ${number(part.ms)}`).join(", ")];
  });
  return table(["run", { right: "ms" }, "", "parts, ms"], rows);
}

function changedTable(values, index) {
  const rows = values.filter((each) => each.values[index + 1] !== each.values[0]).slice(0, 200).map((each) => [each.key, each.values[0] || "–", each.values[index + 1] || "–"]);
  return rows.length ? table(["", "before", "now"], rows) : null;
}

function show(data) {
  shown = data;
  WIDTH = Math.max(260, Math.min(640, document.documentElement.clientWidth - 54)); // texts keep their shape
  const { comparison } = data, [first, ...others] = comparison.runs;
  const legend = data.runs.map((run, index) => make("span", { class: "legend" }, make("span", { class: `square run${index % COLOURS}` }), `${run.id}, ${run.state}`));
  const rounds = comparison.rounds.length ? `, means of ${comparison.rounds.length} rounds` : "";
  const main = make("main", {}, make("h1", {}, `${others.join(", ")} against ${first}${rounds}`), make("p", {}, ...legend));
  for (const text of comparison.incomparable) main.append(make("p", { class: "alarm" }, "not comparable: " + text));
  comparison.limits.forEach((limit, at) => main.append(
    make("p", { class: limit.exceeded === false ? "verdict" : "verdict bad" }, make("strong", {}, `${data.results[at]}  ${limit.condition}`), `${limit.run}: ${limit.text}`)));
  others.forEach((run, index) => {
    main.append(section(`${run} against ${first}`, figureTable(data, index)));
    const recipe = changedTable(comparison.recipe, index), versions = changedTable(comparison.versions, index);
    main.append(section("Recipe", recipe || make("p", {}, "the same")));
    if (versions) main.append(section("Versions", versions));
  });
  main.append(section("Where a step's time goes", make("p", { class: "faint" }, "means over all steps of each run; the table above leaves the first tenth out"), phaseTable(data)));
  if (data.runs.some((run) => run.curve.step.length)) {
    const controls = make("div", { class: "controls" }, choice("over", Object.keys(AXES), view.axis || "steps", (value) => { view.axis = value; view.zoom = null; }, false), make("span", { class: "faint" }, "drag to zoom, double click or Esc for all"));
    main.append(section("Curves", controls, make("div", { class: "charts" }, overlay(data, "loss", data.loss_unit, "loss", false), overlay(data, "step time", "ms", "step_ms", true), overlay(data, "throughput", "samples/s", "samples_per_s", true))));
  }
  document.title = `${others.join(", ")} against ${first}`;
  replaceMain(main);
}

show(JSON.parse(document.getElementById("data").textContent));
