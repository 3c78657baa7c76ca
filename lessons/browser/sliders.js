// Figures with sliders, in the lessons that they belong to and on the page sliders.md. No dependencies.
//
// `formulas` is what the figures compute. tests/docs/test_sliders.py runs them in Node and compares them with the library and the
// lessons. A page mounts a figure at each <div data-slider="roofline">.
"use strict";
const CARDS = {
  // a multiprocessor's limits, as in lesson 31
  T4: { warps: 32, blocks: 16, registers: 65536, shared: 64 * 1024, reserved: 0 },
  A100: { warps: 64, blocks: 32, registers: 65536, shared: 164 * 1024, reserved: 1024 },
  "RTX 4090": { warps: 48, blocks: 24, registers: 65536, shared: 100 * 1024, reserved: 1024 },
  H100: { warps: 64, blocks: 32, registers: 65536, shared: 228 * 1024, reserved: 1024 },
};
const formulas = {
  // Operations per second that a kernel can reach at this intensity (operations per byte).
  roofline: (intensity, bandwidth, peak) => Math.min(intensity * bandwidth, peak),
  // How many blocks each of the four resources of a multiprocessor has room for.
  blockLimits(threads, registers, shared, card) {
    const warps = Math.ceil(threads / 32),
      allocated = 8 * Math.ceil(registers / 8),
      bytes = shared + card.reserved;
    return {
      warps: Math.floor(card.warps / warps),
      blocks: card.blocks,
      registers: Math.floor(
        (4 * Math.floor(Math.floor(card.registers / 4) / (32 * allocated))) / warps,
      ),
      "shared memory": bytes ? Math.floor(card.shared / bytes) : card.blocks,
    };
  },
  residentBlocks: (threads, registers, shared, card) =>
    Math.min(...Object.values(formulas.blockLimits(threads, registers, shared, card))),
  // The share of the cache's memory that holds a token, if each sequence has whole blocks.
  cacheUse(tokens, block) {
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    return sum(tokens) / sum(tokens.map((n) => block * Math.ceil(n / block)));
  },
  // Numbers that a rank sends in an all-reduce of n numbers around a ring.
  ringSends: (n, ranks) => (2 * n * (ranks - 1)) / ranks,
  // After so many steps of the ring: which ranks' numbers each chunk of each rank contains, as bits.
  ringState(ranks, steps) {
    let chunks = Array.from({ length: ranks }, (_, r) => Array(ranks).fill(1 << r));
    for (let s = 0; s < steps; s++) {
      const before = chunks.map((row) => [...row]);
      chunks.forEach((row, r) => {
        const c = formulas.ringReceives(ranks, s, r),
          from = before[(r - 1 + ranks) % ranks][c];
        row[c] = s < ranks - 1 ? row[c] | from : from;
      });
    }
    return chunks;
  },
  // The chunk that a rank receives in step s: first it adds, in the second half it stores.
  ringReceives: (ranks, s, r) =>
    (((s < ranks - 1 ? r - s - 1 : r - (s - ranks + 1)) % ranks) + ranks) % ranks,
  // Tokens of a step with k drafts, each right with probability p if those before it are.
  expectedTokens: (p, k) =>
    Array.from({ length: k + 1 }, (_, i) => p ** i).reduce((a, b) => a + b, 0),
  // The number of drafts with the most tokens per second; seconds[k]: of a step with k drafts.
  bestLength(p, seconds) {
    const speeds = seconds.map((t, k) => formulas.expectedTokens(p, k) / t),
      best = Math.max(...speeds);
    return [speeds.indexOf(best), best / speeds[0]];
  },
};

// ------------------------------------------------------------------ parts of a figure
const element = (parent, tag, attributes = {}, text = "") => {
  const svg = ["svg", "path", "line", "rect", "circle", "text", "g"].includes(tag);
  const made = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  parent.append(made);
  return made;
};
const percent = (x) => `${Math.round(100 * x)} %`;
const digits = (x, n = 3) =>
  x >= 100 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(n));
const plural = (n, thing) => `${n} ${thing}${n === 1 ? "" : "s"}`;

// A figure: sliders, a picture, and a sentence that says the same. draw(values, svg) returns the sentence.
function figure(place, title, controls, size, draw) {
  const box = element(place, "figure", { class: "slider" }),
    values = {};
  element(box, "figcaption", {}, title);
  const panel = element(box, "div", { class: "slider-controls" });
  const svg = element(box, "svg", { viewBox: `0 0 ${size[0]} ${size[1]}`, role: "img" });
  const said = element(box, "p", { class: "slider-said", "aria-live": "polite" });
  const shown = {};
  const redraw = () => {
    for (const [name, c] of Object.entries(controls)) {
      values[name] = c.options ? c.input.value : (c.of || Number)(Number(c.input.value));
      if (!c.options) {
        shown[name].textContent = c.show(values[name], values);
        c.input.setAttribute("aria-valuetext", shown[name].textContent);
      }
    }
    svg.replaceChildren();
    said.textContent = draw(values, svg, controls);
    svg.setAttribute("aria-label", said.textContent);
  };
  for (const [name, c] of Object.entries(controls)) {
    const label = element(panel, "label");
    element(label, "span", {}, c.label);
    if (c.options) {
      c.input = element(label, "select");
      for (const option of c.options) element(c.input, "option", {}, option);
      c.input.value = c.value;
    } else {
      shown[name] = element(label, "output");
      c.input = element(label, "input", {
        type: "range",
        min: c.min,
        max: c.max,
        step: c.step || 1,
      });
      c.input.value = c.value;
    }
    c.input.setAttribute("aria-label", c.label); // a label with an output is the output's
    c.input.addEventListener("input", redraw);
  }
  redraw();
}

// ------------------------------------------------------------------ the figures
const figures = {
  roofline(place) {
    const W = 640,
      H = 300,
      left = 56,
      bottom = 262,
      right = 606,
      top = 14;
    const x = (i) => left + ((Math.log2(i) + 4) / 14) * (right - left); // 1/16 to 1024 operations per byte
    const y = (f) => bottom - ((Math.log10(f) + 1.3) / 4.6) * (bottom - top); // 0.05 to 2000 TFLOP/s
    figure(
      place,
      "The roofline: what limits a kernel?",
      {
        intensity: {
          label: "operations per byte",
          min: -4,
          max: 10,
          step: 0.25,
          value: -1,
          of: (v) => 2 ** v,
          show: (v) => digits(v),
        },
        bandwidth: {
          label: "memory",
          min: 0.2,
          max: 8,
          step: 0.1,
          value: 4,
          show: (v) => `${v.toFixed(1)} TB/s`,
        },
        peak: { label: "arithmetic", min: 5, max: 1000, value: 67, show: (v) => `${v} TFLOP/s` },
      },
      [W, H],
      ({ intensity, bandwidth, peak }, svg) => {
        for (const i of [1 / 16, 1 / 4, 1, 4, 16, 64, 256, 1024]) {
          element(svg, "line", { x1: x(i), x2: x(i), y1: top, y2: bottom, class: "grid" });
          element(
            svg,
            "text",
            { x: x(i), y: bottom + 17, "text-anchor": "middle" },
            i < 1 ? `1/${1 / i}` : i,
          );
        }
        for (const f of [0.1, 1, 10, 100, 1000]) {
          element(svg, "line", { x1: left, x2: right, y1: y(f), y2: y(f), class: "grid" });
          element(svg, "text", { x: left - 8, y: y(f) + 4, "text-anchor": "end" }, f);
        }
        element(svg, "text", { x: right, y: H - 4, "text-anchor": "end" }, "operations per byte");
        element(svg, "text", { x: left + 6, y: top + 10 }, "TFLOP/s");
        const ridge = peak / bandwidth,
          points = [1 / 16, Math.min(Math.max(ridge, 1 / 16), 1024), 1024];
        const d = points
          .map((i) => `${x(i)} ${y(formulas.roofline(i, bandwidth, peak))}`)
          .join(" L ");
        element(svg, "path", { d: `M ${d}`, class: "curve" });
        const reached = formulas.roofline(intensity, bandwidth, peak),
          memory = intensity < ridge;
        element(svg, "line", {
          x1: x(intensity),
          x2: x(intensity),
          y1: bottom,
          y2: y(reached),
          class: memory ? "read dash" : "write dash",
        });
        element(svg, "circle", {
          cx: x(intensity),
          cy: y(reached),
          r: 8,
          class: memory ? "read" : "write",
        });
        return `At most ${digits(reached)} TFLOP/s, ${percent(reached / peak)} of the peak: ${memory ? "memory" : "arithmetic"} is the limit. The ridge is at ${digits(ridge)} operations per byte.`;
      },
    );
  },

  occupancy(place) {
    figure(
      place,
      "Occupancy: how many warps fit into a multiprocessor?",
      {
        card: { label: "card", options: Object.keys(CARDS), value: "H100" },
        threads: {
          label: "threads of a block",
          min: 32,
          max: 1024,
          step: 32,
          value: 256,
          show: String,
        },
        registers: { label: "registers of a thread", min: 16, max: 255, value: 64, show: String },
        shared: {
          label: "shared memory of a block",
          min: 0,
          max: 96,
          value: 16,
          show: (v) => `${v} KB`,
        },
      },
      [640, 214],
      ({ card, threads, registers, shared }, svg) => {
        const most = CARDS[card].warps,
          warps = Math.ceil(threads / 32),
          across = most / 4,
          size = Math.min(36, 600 / across);
        const limits = formulas.blockLimits(threads, registers, 1024 * shared, CARDS[card]),
          blocks = Math.min(...Object.values(limits));
        const left = (640 - across * size) / 2;
        for (let w = 0; w < most; w++) {
          const block = Math.floor(w / warps),
            on = block < blocks,
            g = { x: left + Math.floor(w / 4) * size + 2, y: 4 + (w % 4) * size + 2 };
          element(svg, "rect", {
            ...g,
            width: size - 4,
            height: size - 4,
            rx: 5,
            class: on ? `fill c${block % 4}` : "empty",
          });
        }
        const names = Object.keys(limits);
        names.forEach((name, n) => {
          const column = n * 160 + 4,
            room = Math.min(limits[name], 32);
          element(
            svg,
            "text",
            { x: column, y: 172, class: limits[name] === blocks ? "strong" : "" },
            name,
          );
          element(svg, "rect", { x: column, y: 182, width: 148, height: 8, rx: 4, class: "empty" });
          element(svg, "rect", {
            x: column,
            y: 182,
            width: (148 * room) / 32,
            height: 8,
            rx: 4,
            class: limits[name] === blocks ? "write fill" : "fill c0",
          });
          element(
            svg,
            "text",
            { x: column, y: 208 },
            `${limits[name]} block${limits[name] === 1 ? "" : "s"}`,
          );
        });
        if (!blocks)
          return `Such a block does not fit: ${names.filter((name) => !limits[name]).join(" and ")} for none.`;
        const limit = names.filter((name) => limits[name] === blocks).join(" and ");
        return `${plural(blocks, "block")} of ${plural(warps, "warp")}: ${blocks * warps} of ${most} warps, occupancy ${percent((blocks * warps) / most)}. The limit: ${limit}.`;
      },
    );
  },

  paged_cache(place) {
    const prompts = [870, 412, 640, 133, 958, 255, 721, 508],
      answers = [310, 902, 127, 655, 480, 990, 218, 774],
      row = 2048;
    figure(
      place,
      "A cache in blocks: how much of it holds a token?",
      {
        block: {
          label: "tokens of a block",
          min: 0,
          max: 11,
          value: 8,
          of: (v) => 2 ** v,
          show: String,
        },
        life: {
          label: "of the answers written",
          min: 0,
          max: 100,
          value: 50,
          of: (v) => v / 100,
          show: percent,
        },
      },
      [640, 250],
      ({ block, life }, svg) => {
        const tokens = prompts.map((n, i) => Math.round(n + answers[i] * life)),
          scale = 632 / row;
        tokens.forEach((n, i) => {
          const y = 4 + i * 30,
            room = block * Math.ceil(n / block);
          element(svg, "rect", {
            x: 4,
            y,
            width: row * scale,
            height: 22,
            rx: 3,
            class: "outline",
          });
          element(svg, "rect", {
            x: 4,
            y,
            width: room * scale,
            height: 22,
            rx: 3,
            class: "write faint",
          });
          element(svg, "rect", {
            x: 4,
            y,
            width: n * scale,
            height: 22,
            rx: 3,
            class: `fill c${i % 4}`,
          });
          if (block >= 32)
            for (let p = block; p < room; p += block)
              element(svg, "line", {
                x1: 4 + p * scale,
                x2: 4 + p * scale,
                y1: y,
                y2: y + 22,
                class: "cut",
              });
        });
        const whole = formulas.cacheUse(tokens, row),
          used = formulas.cacheUse(tokens, block);
        return `Blocks of ${plural(block, "token")}: ${percent(used)} of the memory holds a token. Rows of ${row} tokens: ${percent(whole)}. So the cache has room for ${digits(used / whole, 2)} times as many sequences.`;
      },
    );
  },

  ring(place) {
    figure(
      place,
      "All-reduce in a ring, step by step",
      {
        ranks: { label: "ranks", min: 2, max: 8, value: 4, show: String },
        step: {
          label: "steps",
          min: 0,
          max: 14,
          value: 1,
          show: (v, all) => `${Math.min(v, 2 * all.ranks - 2)} of ${2 * all.ranks - 2}`,
        },
      },
      [640, 164],
      ({ ranks, step }, svg, controls) => {
        const steps = Math.min(step, 2 * ranks - 2),
          state = formulas.ringState(ranks, steps);
        controls.step.input.max = 2 * ranks - 2;
        const height = 34,
          width = (640 - 70) / ranks,
          left = 66;
        svg.setAttribute("viewBox", `0 0 640 ${28 + ranks * height}`);
        const full = 2 ** ranks - 1;
        for (let c = 0; c < ranks; c++)
          element(
            svg,
            "text",
            { x: left + (c + 0.5) * width, y: 14, "text-anchor": "middle" },
            `chunk ${c}`,
          );
        state.forEach((row, r) => {
          const y = 24 + r * height;
          element(
            svg,
            "text",
            { x: left - 10, y: y + height / 2 + 4, "text-anchor": "end" },
            `rank ${r}`,
          );
          row.forEach((bits, c) => {
            const mine = [...Array(ranks).keys()].filter((n) => (bits >> n) & 1),
              x = left + c * width + 2,
              part = (width - 4) / ranks;
            element(svg, "rect", {
              x,
              y: y + 2,
              width: width - 4,
              height: height - 4,
              rx: 4,
              class: bits === full ? "sync fill" : "empty",
            });
            if (bits !== full)
              for (const n of mine)
                element(svg, "rect", {
                  x: x + n * part,
                  y: y + 2,
                  width: part,
                  height: height - 4,
                  rx: 3,
                  class: "read fill",
                });
            if (steps && formulas.ringReceives(ranks, steps - 1, r) === c)
              element(svg, "rect", {
                x: x - 1,
                y: y + 1,
                width: width - 2,
                height: height - 2,
                rx: 5,
                class: "ringed",
              });
          });
        });
        const done = state.flat().filter((bits) => bits === full).length,
          half = steps < ranks ? "adds" : "stores";
        const sent = `In all steps a rank sends 2 (R - 1) / R = ${digits(formulas.ringSends(1, ranks))} times its numbers.`;
        if (!steps) return `Each rank has its own numbers, cut into ${ranks} chunks. ${sent}`;
        return `Step ${steps}: each rank ${half} the framed chunk, which its left neighbour has sent. ${done} of ${ranks * ranks} chunks are complete. ${sent}`;
      },
    );
  },

  speculation(place) {
    const MOST = 15;
    figure(
      place,
      "Speculation: how many drafts pay?",
      {
        p: {
          label: "a draft is right",
          min: 0,
          max: 100,
          value: 70,
          of: (v) => v / 100,
          show: percent,
        },
        cost: {
          label: "a draft costs",
          min: 0,
          max: 50,
          value: 8,
          of: (v) => v / 100,
          show: (v) => `${percent(v)} of a step`,
        },
      },
      [640, 280],
      ({ p, cost }, svg) => {
        const seconds = Array.from({ length: MOST + 1 }, (_, k) => 1 + cost * k),
          speeds = seconds.map((t, k) => formulas.expectedTokens(p, k) / t);
        const [best, speedup] = formulas.bestLength(p, seconds),
          top = Math.max(2, Math.ceil(Math.max(...speeds))),
          y = (v) => 240 - (v / top) * 220;
        for (let v = 0; v <= top; v += Math.ceil(top / 4)) {
          element(svg, "line", { x1: 40, x2: 632, y1: y(v), y2: y(v), class: "grid" });
          element(svg, "text", { x: 32, y: y(v) + 4, "text-anchor": "end" }, `${v}×`);
        }
        speeds.forEach((v, k) => {
          const x = 44 + k * 37;
          element(svg, "rect", {
            x,
            y: y(v),
            width: 29,
            height: 240 - y(v),
            rx: 4,
            class: k === best ? "sync fill" : v < 1 ? "write faint" : "fill c0",
          });
          element(
            svg,
            "text",
            { x: x + 14.5, y: 257, "text-anchor": "middle", class: k === best ? "strong" : "" },
            k,
          );
        });
        element(svg, "line", { x1: 40, x2: 632, y1: y(1), y2: y(1), class: "one" });
        element(svg, "text", { x: 632, y: 275, "text-anchor": "end" }, "drafts in a step");
        if (!best) return "No number of drafts pays: without drafts it is fastest.";
        return `${plural(best, "draft")}: ${digits(formulas.expectedTokens(p, best))} tokens in a step that takes ${digits(seconds[best])} times as long, ${digits(speedup)} times the speed.`;
      },
    );
  },
};

if (typeof document === "undefined") module.exports = { formulas, CARDS };
else
  for (const place of document.querySelectorAll("[data-slider]"))
    figures[place.dataset.slider](place);
