"use strict";
// The charts of a page: values under the cursor, and a horizontal axis of steps, tokens or wall-clock time. chart.py drew the
// paths; each .plot has the numbers in data-chart. On a live page (live.py) the sections are replaced when they change.
// Text from a run is only ever set as textContent.
const SIDE = 1000, MOST_ROWS = 12, REACH = 0.02, POLL_MS = 2000;
const charts = new Map();
let axis = "steps", pointer = null;

const make = (tag, name, text = "") => Object.assign(document.createElement(tag), { className: name, textContent: text });
const axisOf = chart => (chart.axes[axis] ? axis : "steps");

function vertical(chart, y) {
  const scale = chart.log ? Math.log : v => v, [low, high] = chart.y;
  return (scale(y) - scale(low)) / (scale(high) - scale(low));
}

function draw(plot, chart) {
  const name = axisOf(chart), { low, high, ticks } = chart.axes[name];
  const across = x => (x - low) / (high - low);
  const paths = plot.querySelectorAll("path:not(.grid)");
  chart.curves.forEach((curve, i) => {
    curve.at = curve[name].map(across);
    let d = "", begun = false;
    curve.at.forEach((x, k) => {
      const y = curve.values[k];
      if (y === null) { begun = false; return; }
      const dot = curve.style === "dots";
      const single = !begun && (k + 1 === curve.at.length || curve.values[k + 1] === null);
      d += `${begun && !dot ? "L" : "M"}${(SIDE * x).toFixed(1)} ${(SIDE * (1 - vertical(chart, y))).toFixed(1)}`;
      if (dot || single) d += "h0";
      begun = true;
    });
    paths[i].setAttribute("d", d);
  });
  plot.querySelectorAll("span.x").forEach(label => label.remove());
  for (const [x, text] of ticks) {
    const label = make("span", "x", text);
    label.style.left = `${100 * across(x)}%`;
    plot.append(label);
  }
  plot.querySelector("svg").setAttribute("aria-label", `${chart.title} over ${chart.axes[name].name}`);
}

function number(y) {
  if (y !== 0 && (Math.abs(y) < 1e-3 || Math.abs(y) >= 1e6)) return y.toExponential(3);
  return y.toLocaleString("en", { maximumSignificantDigits: 5 });
}

function duration(seconds) {
  const [size, unit] = seconds >= 172800 ? [86400, "d"] : seconds >= 7200 ? [3600, "h"] : seconds >= 120 ? [60, "min"] : [1, "s"];
  return `${(seconds / size).toLocaleString("en", { maximumSignificantDigits: 3 })} ${unit}`;
}

function nearest(at, x) {
  let best = 0;
  at.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(at[best] - x)) best = i; });
  return best;
}

// Show the values at the fractions x and y of a plot's width and height.
function show(plot, x, y) {
  const chart = charts.get(plot);
  const found = chart.curves.map(curve => ({ curve, i: nearest(curve.at, x) }));
  const off = f => Math.abs(f.curve.at[f.i] - x);
  const first = found.reduce((a, b) => (off(b) < off(a) ? b : a));
  const at = first.curve.at[first.i], names = new Set();
  let rows = found.filter(f => {
    const known = Math.abs(f.curve.at[f.i] - at) <= REACH && f.curve.values[f.i] !== null && !names.has(f.curve.name);
    if (known) names.add(f.curve.name);
    return known;
  });
  if (rows.length > MOST_ROWS) {
    const away = f => Math.abs(vertical(chart, f.curve.values[f.i]) - (1 - y));
    const kept = new Set([...rows].sort((a, b) => away(a) - away(b)).slice(0, MOST_ROWS));
    rows = rows.filter(f => kept.has(f));
  }
  hide();
  const line = make("div", "cursor"), tip = make("div", "tip");
  const where = [`step ${number(first.curve.steps[first.i])}`];
  if (first.curve.tokens) where.push(`${number(first.curve.tokens[first.i])} tokens`, duration(first.curve.time[first.i]));
  tip.append(make("div", "where", where.join(" · ")));
  for (const { curve, i } of rows) {
    const row = make("div", "row"), color = make("i", "");
    color.style.background = curve.color;
    row.append(color, make("em", "", curve.name), make("b", "", number(curve.values[i])));
    tip.append(row);
  }
  line.style.left = `${100 * at}%`;
  plot.append(line, tip);
  const box = plot.getBoundingClientRect(), wide = tip.offsetWidth, x0 = at * box.width;
  const place = at <= 0.5 ? x0 + 10 : x0 - 10 - wide;
  const last = document.documentElement.clientWidth - 4 - box.left - wide; // beyond it the page would become wider
  tip.style.left = `${Math.max(4 - box.left, Math.min(place, last))}px`;
  plot.at = { x: at, y };
}

const hide = () => document.querySelectorAll(".plot .cursor, .plot .tip").forEach(element => element.remove());

function follow(event) {
  pointer = { x: event.clientX, y: event.clientY };
  const plot = event.target.closest?.(".plot");
  if (!charts.has(plot)) return hide();
  const box = plot.getBoundingClientRect();
  show(plot, (pointer.x - box.left) / box.width, (pointer.y - box.top) / box.height);
}

function prepare(root) {
  for (const plot of charts.keys()) if (!plot.isConnected) charts.delete(plot);
  for (const plot of root.querySelectorAll(".plot")) {
    const chart = JSON.parse(plot.dataset.chart);
    charts.set(plot, chart);
    draw(plot, chart);
  }
  for (const group of root.querySelectorAll(".axis")) {
    group.hidden = false;
    for (const button of group.children) button.setAttribute("aria-pressed", button.dataset.axis === axis);
  }
}

document.addEventListener("pointermove", follow);
document.addEventListener("pointerdown", follow);
document.addEventListener("pointerleave", hide);
document.addEventListener("focusin", event => { if (charts.has(event.target) && event.target.matches(":focus-visible")) show(event.target, 1, 0.5); });
document.addEventListener("focusout", hide);
document.addEventListener("keydown", event => {
  const plot = event.target, side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === "Escape") hide();
  if (!charts.has(plot) || !side) return;
  event.preventDefault();
  const from = plot.at ? plot.at.x : 1;
  const points = charts.get(plot).curves.flatMap(curve => curve.at).filter(x => side * (x - from) > 1e-9);
  if (points.length) show(plot, side > 0 ? Math.min(...points) : Math.max(...points), 0.5);
});
document.addEventListener("click", event => {
  const button = event.target.closest?.("[data-axis]");
  if (!button) return;
  axis = button.dataset.axis;
  hide();
  prepare(document);
});

// ----------------------------------------------------------------------------- a live page
const sections = [...document.querySelectorAll("main > section")].map(section => section.innerHTML);

function replaceSection(i, html) {
  const main = document.querySelector("main");
  while (main.children.length <= i) main.append(document.createElement("section"));
  if (sections[i] === html) return;
  sections[i] = html;
  const section = main.children[i];
  const open = new Map([...section.querySelectorAll("details")].map(d => [d.firstChild.textContent, d.open]));
  section.innerHTML = html;
  for (const details of section.querySelectorAll("details")) {
    const before = open.get(details.firstChild.textContent);
    if (before !== undefined) details.open = before;
  }
  prepare(section);
}

async function poll(state) {
  const stamp = state.dataset.live;
  try {
    const answer = await fetch(`content?after=${encodeURIComponent(stamp)}`);
    if (!answer.ok) throw new Error(await answer.text());
    if (answer.status === 200) {
      const content = await answer.json();
      state.dataset.live = content.stamp;
      content.sections.forEach((html, i) => replaceSection(i, html));
      const plot = pointer && document.elementFromPoint(pointer.x, pointer.y)?.closest(".plot");
      if (charts.has(plot) && !plot.querySelector(".tip")) follow({ clientX: pointer.x, clientY: pointer.y, target: plot });
    }
    state.textContent = `live, last change ${new Date(1000 * parseFloat(state.dataset.live)).toLocaleTimeString()}`;
  } catch (error) {
    state.textContent = `not live: ${error.message}`;
  }
  setTimeout(poll, POLL_MS, state);
}

prepare(document);
const state = document.querySelector("[data-live]");
if (state) poll(state);
