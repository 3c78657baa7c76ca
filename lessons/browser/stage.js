// A kernel and what its threads do, next to each other: the code, Run, the stepper. The first page and the playground use it.
//
// The HTML of a stage (lessons/tools/pages.py) holds the program and the stepper of a run that the site's build has made, so that
// it can be stepped through at once. Python is loaded at the first Run.
"use strict";
const DATA = /(?<=id="data">)([^]*?)(?=<\/script>)/; // of a stepper's page
const dark = () => document.body.dataset.mdColorScheme === "slate";

class Stage {
  constructor(root) {
    this.root = root;
    this.frame = root.querySelector("iframe");
    this.said = root.querySelector(".stage-said");
    this.out = root.querySelector(".stage-out");
    this.file = root.dataset.file;
    this.runButton = root.querySelector("[data-do=run]");
    this.running = false;
    this.confined = root.dataset.confined !== undefined; // programs may come from others
    const place = root.querySelector(".stage-code-place");
    this.field = codeField(place, place.querySelector("pre").textContent.trimEnd(), {
      label: this.file,
      run: () => this.run(),
      change: () => this.changed(),
    });
    this.original = this.field.value;
    this.mode = this.frame.dataset.stepper;
    [this.head, this.data, this.tail] = this.frame.srcdoc.split(DATA);
    this.runButton.addEventListener("click", (event) => {
      if (this.loading || event.detail > 1) return; // the second click of a double click would stop it
      if (this.running) this.stop();
      else this.run();
    });
    root
      .querySelector("[data-do=reset]")
      ?.addEventListener("click", () => this.load(this.file, this.original, this.first));
    this.frame.addEventListener("load", () => this.framed());
    if (this.frame.contentDocument?.getElementById("said")) this.framed();
    new MutationObserver(() => this.theme()).observe(document.body, {
      attributeFilter: ["data-md-color-scheme"],
    });
  }

  // The stepper's page is there: follow its steps, its height and the theme.
  framed() {
    const page = this.frame.contentDocument;
    if (!page?.getElementById("said")) return;
    this.theme();
    page.body.style.fontFamily = getComputedStyle(this.root).fontFamily;
    page.addEventListener("stepped", (event) => this.stepped(event.detail));
    new ResizeObserver(() => {
      this.frame.style.height = `${Math.ceil(page.body.getBoundingClientRect().height) + 4}px`;
    }).observe(page.body);
    page.dispatchEvent(new Event("again"));
  }

  theme() {
    const page = this.frame.contentDocument?.documentElement;
    if (page) page.style.colorScheme = dark() ? "dark" : "light";
  }

  // Mark the lines of a step, unless the program has been changed since the run.
  stepped(step) {
    if (this.edited || this.running) return;
    const mine = (lines) => lines.filter(([file]) => file === this.file).map(([, line]) => line);
    this.field.mark({ now: mine(step.lines), bad: mine(step.bad) });
    this.root.dispatchEvent(new CustomEvent("step", { detail: step }));
  }

  changed() {
    this.edited = true;
    this.root.classList.add("edited");
    this.root.dispatchEvent(new CustomEvent("edit"));
  }

  // Show another program, and the result of a run of it if there is one.
  load(file, source, result) {
    if (this.running) this.stop();
    this.turn = null;
    this.button("Run");
    this.file = this.field.label = file;
    this.root.querySelector(".stage-file").textContent = file;
    this.original = source = source.trimEnd();
    this.field.value = source;
    this.first = result;
    this.frame.dataset.stepper = this.mode;
    this.show(result);
  }

  // Show what the reader has written earlier, in the place of the program.
  write(source) {
    this.field.value = source;
    this.say("", "Press Run.");
    this.changed();
  }

  // The lines of the program that a report names: "rotate.py:12", or those of a traceback.
  linesOf(report) {
    const name = this.file.replaceAll(".", "\\."),
      place = new RegExp(`${name}(?::|", line )(\\d+)`, "g");
    return [...report.matchAll(place)].map((found) => Number(found[1]));
  }

  say(kind, text) {
    this.root.dataset.state = kind;
    this.said.textContent = text;
  }

  print(text) {
    this.out.textContent = text;
    this.out.hidden = !text;
  }

  // result: {printed, error, data} of a run, or null. data: that of the stepper's page.
  show(result) {
    this.edited = false;
    this.root.classList.remove("edited");
    this.result = result;
    this.print(result?.printed || "");
    this.frame.hidden = !result?.data;
    if (result?.data) this.frame.srcdoc = this.head + result.data + this.tail;
    this.field.mark({ bad: this.linesOf(result?.error || "") });
    if (!result) this.say("", "Press Run.");
    else if (result.error) this.say("bad", result.error);
    else if (!result.data) this.say("good", "It has run to its end. It has launched no kernel.");
    else this.say("good", "It has run to its end: no race, no deadlock, no access out of bounds.");
    this.root.dispatchEvent(new CustomEvent("shown", { detail: result }));
  }

  async run() {
    if (this.running) return;
    const turn = (this.turn = {}); // another program may be chosen while this one runs
    const source = this.field.value;
    this.button("Loading");
    try {
      await loadPython(this.confined, (text) => {
        if (this.turn === turn) this.say("busy", text);
      });
      if (this.turn !== turn) return;
      this.button("Stop");
      this.say("busy", "Running …");
      this.print("");
      const result = await runProgram(source, this.file, (printed) => {
        if (this.turn === turn) this.print(printed);
      });
      if (this.turn !== turn) return;
      this.frame.dataset.stepper = "embedded"; // a reader's own run begins where its error shows
      this.button("Run");
      this.show(result);
      if (this.field.value === source) return;
      this.field.mark({}); // it was changed while it ran
      this.changed();
    } catch (error) {
      if (this.turn === turn) this.say("bad", error.message);
    } finally {
      if (this.turn === turn) this.button("Run");
    }
  }

  button(text) {
    this.running = text !== "Run";
    this.loading = text === "Loading"; // there is nothing to stop
    this.runButton.textContent = text;
    this.runButton.setAttribute("aria-disabled", this.loading); // not disabled: that would take the focus from it
  }

  stop() {
    runtime?.stop();
  }
}

// ------------------------------------------------------------------ Python, which is loaded at the first run
let runtime = null,
  listener = () => {};
const LOADING = "Loading Python, once:";

// tell: called with what it is doing.
async function loadPython(confined, tell) {
  if (location.protocol === "file:")
    throw new Error(
      "A page that was opened from a file cannot load Python: open the site with `mkdocs serve`.",
    );
  tell(`${LOADING} …`);
  const { start } = await import("./runtime.js").catch(() => {
      throw new Error(
        "The site cannot be reached: look whether you are online, and press Run again.",
      );
    }),
    first = !runtime;
  listener = ({ text, seconds }) => tell(`${LOADING} ${text} … ${Math.round(seconds)} s`);
  runtime = await start(
    first ? { confined, onProgress: (progress) => listener(progress) } : { confined },
  );
  listener = () => {}; // after a stop Python loads again, unasked
}

// tell: called with what it has printed.
async function runProgram(source, file, tell) {
  let printed = "";
  const { error, page } = await runtime.run(source, {
    file,
    onOutput: (text) => {
      printed += text;
      tell(printed);
    },
  });
  // Only the data of the page is used, in the frame that came with the site: a program that arrived as a link may have
  // written anything into the page.
  const data = page
    ? JSON.stringify(JSON.parse(page.match(DATA)[0])).replaceAll("<", "\\u003c")
    : "";
  return { printed, error, data };
}
