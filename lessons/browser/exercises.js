// The exercises of a lesson's page: an editor with Run and Check in the place of each cell with a gap.
// lessons/tools/browser.py marks these cells with data-piece, and writes the JSON that this reads.

import { editor } from "./editor.js";
import { start } from "./runtime.js";
import {
  exported,
  firstLines,
  imported,
  joined,
  keep,
  note,
  opened,
  passed,
  pieces,
  replaced,
  watch,
} from "./storage.js";

const lesson = JSON.parse(document.getElementById("lesson-exercises").textContent);
const about = lesson.pieces;
about[0].text = lesson.head + about[0].text;
const texts = pieces(lesson.file, about);
const cells = []; // of the exercises, in their order
let runtime; // from the first Run or Check on
let busy; // the cell whose program runs

// element("button", { textContent: "Run", onclick: ... }, children...)
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

class Cell {
  constructor(place, index) {
    this.index = index;
    this.piece = about[index];
    const { number } = this.piece;
    const button = (text, does) =>
      element("button", { textContent: text, type: "button", onclick: () => does.call(this) });
    this.runButton = button("Run", this.run);
    this.checkButton = button("Check", this.check);
    this.checkButton.className = "main";
    this.stopButton = button("Stop", () => runtime.stop());
    this.resetButton = button("Start over", this.reset);
    this.status = element("span", { className: "status" });
    this.status.setAttribute("role", "status");
    this.clock = element("span", { className: "clock" });
    this.clock.setAttribute("aria-hidden", "true"); // a screen reader would read each tenth of a second
    this.mark = element("span", { className: "mark", textContent: "✓ passed", hidden: true });
    const label = number ? `Exercise ${number}` : this.piece.name;
    this.output = element("pre", { className: "output", hidden: true, tabIndex: 0 });
    this.output.setAttribute("role", "region");
    this.output.setAttribute("aria-label", `${label}: output`);
    this.steps = element("details", { className: "steps", hidden: true });
    const buttons = [
      this.runButton,
      number ? this.checkButton : "",
      this.stopButton,
      this.resetButton,
    ];
    const frame = element("div", { className: "editor" });
    this.block = element("div", { className: "exercise" }, frame);
    this.block.setAttribute("role", "group");
    this.block.setAttribute("aria-label", label);
    const runs = !this.piece.elsewhere;
    if (runs) {
      const bar = element("div", { className: "bar" }, ...buttons, this.mark, this.status);
      bar.append(this.clock);
      this.block.append(bar, this.output, this.steps);
    } else this.block.append(elsewhere(this.piece, this.mark));
    place.querySelector(".jp-Cell-inputWrapper").hidden = true;
    place.append(this.block);
    this.editor = editor(frame, {
      text: texts[index],
      label,
      onChange: (text) => this.changed(text),
      onRun: () => runs && (number ? this.check() : this.run()),
    });
    this.show(false);
  }

  changed(text) {
    texts[this.index] = text.trimEnd();
    isKept(keep(lesson.file, texts, about));
    numberLines();
  }

  reset() {
    if (confirm("Replace what you wrote here with the lesson's text?"))
      this.editor.set(this.piece.text);
  }

  // Show what can be done while a program runs here or in another cell, or none does.
  show(runs) {
    this.stopButton.hidden = !runs || Boolean(progress); // there is nothing to stop while Python loads
    for (const button of [this.runButton, this.checkButton])
      button.setAttribute("aria-disabled", Boolean(busy)); // not disabled: that would take the focus from it
    const isPassed = passed().has(this.piece.number);
    this.block.classList.toggle("passed", isPassed);
    this.mark.hidden = !isPassed;
  }

  run() {
    const upToHere = joined(texts.slice(0, this.index + 1));
    const options = { file: `/my_lessons/${lesson.file}.py`, onOutput: (text) => this.print(text) };
    return this.during(async () => {
      const { ok, error, page, stopped, seconds } = await runtime.run(upToHere, options);
      if (error && !stopped) this.report(error);
      else if (ok && this.output.hidden)
        this.report(
          "It ran, and printed nothing: call your function below it, and print what it gives.",
        );
      this.say(stopped ? "Stopped." : ok ? "Done" : "An error", seconds);
      this.showSteps(page);
    });
  }

  check() {
    const { number } = this.piece;
    return this.during(async () => {
      const begin = performance.now();
      const said = await runtime.check(number, joined(texts), {
        file: lesson.file,
        onOutput: (text) => this.print(text),
      });
      if (said.stopped) return this.say("Stopped.");
      this.say(said.passed ? "Correct" : "Not yet", (performance.now() - begin) / 1000);
      this.report(said.text);
      this.output.classList.add("verdict", said.passed ? "right" : "wrong");
      if (said.passed !== null) isKept(note(number, said.passed));
      this.showSteps(said.page);
      showProgress();
    });
  }

  // Load Python if needed, then call `work`. Until it ends, the buttons of all cells do nothing.
  async during(work) {
    if (busy) return;
    busy = this;
    cells.forEach((cell) => cell.show(cell === this));
    this.output.hidden = true;
    this.output.textContent = "";
    this.output.className = "output";
    this.showSteps("");
    const clock = setInterval(() => this.tick(), 100);
    this.begin = performance.now();
    try {
      progress = { text: "Python", done: 0, of: 4 };
      this.show(true);
      runtime = await start({ onProgress: showLoading });
      progress = null;
      this.show(true);
      this.begin = performance.now();
      await work();
    } catch (error) {
      this.report(error.message);
      this.say("An error");
    } finally {
      clearInterval(clock);
      progress = null;
      busy = undefined;
      cells.forEach((cell) => cell.show(false));
    }
  }

  tick() {
    const loads =
      progress && `Loading ${progress.text}, step ${progress.done + 1} of ${progress.of}`;
    this.say(loads || "Running", (performance.now() - this.begin) / 1000);
  }

  // What the cell does, or how it has ended, and the time of it.
  say(text, seconds) {
    if (this.status.textContent !== text) this.status.textContent = text;
    this.clock.textContent = seconds === undefined ? "" : `${seconds.toFixed(1)} s`;
  }

  // A part of what the program prints.
  print(text) {
    this.output.hidden = false;
    this.output.append(text);
  }

  // A text of its own, below what the program has printed.
  report(text) {
    const begun = this.output.lastChild?.data.endsWith("\n") === false;
    this.print(`${begun ? "\n" : ""}${text}\n`);
  }

  // The page of the stepper, which is shown when it is opened.
  showSteps(html) {
    this.steps.hidden = !html;
    this.steps.open = false;
    const title = "the threads of a block, step by step";
    const frame = () => element("iframe", { srcdoc: html, title, sandbox: "allow-scripts" });
    this.steps.replaceChildren(element("summary", { textContent: "Step through it" }));
    this.steps.ontoggle = () =>
      this.steps.open && !this.steps.querySelector("iframe") && this.steps.append(frame());
  }
}

let progress = null; // of loading Python, while a cell waits for it
const showLoading = (now) => (progress &&= now);

function elsewhere({ elsewhere, number }, mark) {
  const command = (text) => element("code", { textContent: text });
  return element(
    "p",
    { className: "elsewhere" },
    `${elsewhere} On your machine: `,
    command(`xtrain lesson start ${lesson.lesson}`),
    ", and then ",
    command(`xtrain lesson check ${number ?? lesson.lesson}`),
    " ",
    mark,
  );
}

// Number the lines as in the whole file, which errors and verdicts name.
function numberLines() {
  const firsts = firstLines(texts);
  cells.forEach((cell) => cell.editor.firstLine(firsts[cell.index]));
}

// ------------------------------------------------------------------ the bar under the title: progress, files
const count = element("span", { className: "count" });
const warning = element("strong", { className: "unkept" });
warning.setAttribute("role", "alert");

function isKept(kept) {
  const text = kept
    ? ""
    : "Not kept: this browser's storage is full or closed. Save to a file before you leave.";
  if (warning.textContent !== text) warning.textContent = text;
}

const chooser = element("input", {
  type: "file",
  multiple: true,
  accept: ".py,.txt,.zip",
  hidden: true,
  onchange: load,
});

function showProgress() {
  const numbers = about.map((piece) => piece.number).filter(Boolean);
  const done = numbers.filter((number) => passed().has(number));
  count.textContent = `${done.length} of ${numbers.length} exercises passed`;
  cells.forEach((cell) => cell.show(cell === busy));
}

function save() {
  const address = URL.createObjectURL(exported());
  element("a", { href: address, download: "my_lessons.zip" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

async function load() {
  try {
    const found = await opened(chooser.files);
    if (!Object.keys(found).length)
      throw new Error(
        "Choose my_lessons.zip, or files of the folder my_lessons: 01_threads.py, passed.txt.",
      );
    const lost = replaced(found);
    if (lost.length && !confirm(`Replace what you wrote here in ${lost.join(", ")}?`)) return;
    imported(found);
    location.reload();
  } catch (error) {
    alert(error.message);
  } finally {
    chooser.value = ""; // the same file can be chosen again
  }
}

// Another tab has changed the file: show it here, too, so that this tab does not write its older text over it.
function follow() {
  texts.splice(0, texts.length, ...pieces(lesson.file, about));
  for (const cell of cells)
    if (cell.editor.text().trimEnd() !== texts[cell.index]) cell.editor.set(texts[cell.index]);
  numberLines();
}

function bar() {
  const button = (text, title, onclick) =>
    element("button", { textContent: text, title, type: "button", onclick });
  return element(
    "div",
    { className: "exercise-bar" },
    count,
    warning,
    button(
      "Save to a file",
      "my_lessons.zip: unpack it, and `xtrain lesson` continues there",
      save,
    ),
    button("Open a file", "my_lessons.zip, or files of the folder my_lessons", () =>
      chooser.click(),
    ),
    chooser,
  );
}

document
  .querySelectorAll("[data-piece]")
  .forEach((place) => cells.push(new Cell(place, Number(place.dataset.piece))));
document.querySelectorAll(".clipboard-copy-txt").forEach((text) => {
  const number = text.textContent.match(/^lesson\.check\("([\d.]+)"/)?.[1];
  const piece = about.find((piece) => piece.number === number);
  if (piece && !piece.elsewhere) text.closest(".jp-Cell").hidden = true; // the button Check does this
});
document.querySelector("article h1, h1")?.after(bar());
watch(lesson.file, follow, showProgress);
numberLines();
showProgress();
