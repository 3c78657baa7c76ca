// A field for a few lines of Python: line numbers, colours, marked lines. No dependencies; it works on a phone.
//
//     const field = codeField(parent, "x = 1\n", {label: "kernel.py", run: () => ..., change: text => ...});
//     field.value;  field.value = "x = 2\n";  field.mark({now: [1], bad: [2, 3]});
//
// A transparent <textarea> lies over the same text in colours, so that the browser's own editing, undo and keyboard work.
// Enter keeps the indentation, Tab indents, Escape and then Tab leaves the field, Ctrl-Enter runs.
"use strict";
globalThis.codeField = (() => {
  const WORD =
    /^(def|return|for|in|if|elif|else|while|and|or|not|is|pass|break|continue|import|from|as|with|assert|lambda|class|None|True|False)$/;
  const TOKEN =
    /#.*|("""|''')[^]*?(?:\1|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|@[\w.]+|\b\d[\w.]*|[\p{L}_][\p{L}\p{N}_]*|\s+|[^]/gu;
  const MOST_COLOURED = 100_000; // characters: more take too long after each key
  const classOf = (token) =>
    token[0] === "#"
      ? "c"
      : /^["']/.test(token)
        ? "q"
        : token[0] === "@" || WORD.test(token)
          ? "k"
          : /^\d/.test(token)
            ? "n"
            : "";

  // The text as one element for each line.
  function painted(text) {
    if (text.length > MOST_COLOURED)
      return text
        .split("\n")
        .map((line) => Object.assign(document.createElement("div"), { textContent: line }));
    const lines = [document.createElement("div")];
    for (const [token] of text.matchAll(TOKEN))
      token.split("\n").forEach((part, i) => {
        if (i) lines.push(document.createElement("div"));
        const name = classOf(token),
          line = lines[lines.length - 1];
        if (!name) return line.append(part);
        line.append(
          Object.assign(document.createElement("span"), { className: name, textContent: part }),
        );
      });
    return lines;
  }

  function codeField(parent, text, { label, run = () => {}, change = () => {} } = {}) {
    const box = document.createElement("div"),
      back = document.createElement("pre"),
      area = document.createElement("textarea");
    box.className = "code-field";
    Object.assign(area, { value: text, spellcheck: false, autocomplete: "off", wrap: "off" });
    for (const [name, value] of [
      ["aria-label", label],
      ["aria-description", "Control and Enter run it. Escape, then Tab leaves the editor."],
      ["autocapitalize", "off"],
      ["autocorrect", "off"],
    ])
      area.setAttribute(name, value);
    back.setAttribute("aria-hidden", "true");
    const sheet = document.createElement("div");
    sheet.className = "code-sheet";
    sheet.append(back, area);
    box.append(sheet);
    parent.replaceChildren(box);
    let marks = {},
      leaving = false;
    function paint() {
      const lines = painted(area.value);
      for (const [name, numbers] of Object.entries(marks))
        for (const n of numbers) lines[n - 1]?.classList.add(name);
      back.replaceChildren(...lines);
    }
    const insert = (piece) => document.execCommand("insertText", false, piece);
    area.addEventListener("input", () => {
      marks = {};
      paint();
      change();
    });
    area.addEventListener("keydown", (event) => {
      const before = area.value.slice(0, area.selectionStart),
        line = before.slice(before.lastIndexOf("\n") + 1);
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        run();
      } else if (event.key === "Enter") {
        event.preventDefault();
        insert("\n" + line.match(/^[ \t]*/)[0] + (/:\s*(#.*)?$/.test(line) ? "    " : ""));
      } else if (event.key === "Tab" && !event.shiftKey && !leaving) {
        event.preventDefault();
        insert(" ".repeat(4 - (line.length % 4)));
      } else if (
        event.key === "Backspace" &&
        area.selectionStart === area.selectionEnd &&
        /^(    )+$/.test(line)
      ) {
        event.preventDefault();
        area.setSelectionRange(area.selectionStart - 4, area.selectionStart);
        insert("") || document.execCommand("delete");
      }
      leaving = event.key === "Escape" || (leaving && event.key === "Shift");
    });
    paint();
    return {
      get value() {
        return area.value;
      },
      set value(other) {
        area.value = other;
        marks = {};
        paint();
      },
      set label(text) {
        area.setAttribute("aria-label", text);
      },
      // Mark lines, and scroll so far that they are in sight.
      mark(some) {
        marks = some;
        paint();
        const marked = back.querySelectorAll(
          Object.keys(some)
            .map((name) => `.${name}`)
            .join(),
        );
        if (!marked.length) return;
        const top = marked[0].offsetTop,
          end = marked[marked.length - 1].offsetTop + 22;
        if (top < box.scrollTop || end > box.scrollTop + box.clientHeight)
          box.scrollTop = (top + end - box.clientHeight) / 2;
      },
      // Replace a line, as if it were typed.
      write(line, piece) {
        const lines = area.value.split("\n"),
          start = lines.slice(0, line - 1).join("\n").length + (line > 1);
        area.focus();
        area.setSelectionRange(start, start + lines[line - 1].length);
        insert(piece);
      },
    };
  }
  return codeField;
})();
