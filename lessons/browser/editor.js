// An editor for Python: CodeMirror 6, with the colours of the page (cells.css).
//
//   const mine = editor(element, { text, onChange: (text) => ..., onRun: () => ..., firstLine: 12, label: "Exercise 1.1" });
//   mine.text();  mine.set(text);  mine.firstLine(14);

import { defaultKeymap, history, historyKeymap, indentWithTab } from "./codemirror/commands.js";
import { pythonLanguage } from "./codemirror/lang-python.js";
import {
  bracketMatching,
  indentOnInput,
  indentUnit,
  syntaxHighlighting,
} from "./codemirror/language.js";
import { classHighlighter } from "./codemirror/highlight.js";
import { Compartment, EditorState } from "./codemirror/state.js";
import { EditorView, drawSelection, keymap, lineNumbers } from "./codemirror/view.js";

const numbersFrom = (first) => lineNumbers({ formatNumber: (n) => String(n + first - 1) });

export function editor(
  element,
  { text = "", onChange = () => {}, onRun = () => {}, firstLine = 1, label = "Python" } = {},
) {
  const numbers = new Compartment();
  let first = firstLine;
  const changed = EditorView.updateListener.of((update) => {
    if (update.docChanged) onChange(update.state.doc.toString());
  });
  const view = new EditorView({
    parent: element,
    state: EditorState.create({
      doc: text,
      extensions: [
        numbers.of(numbersFrom(first)),
        history(),
        drawSelection(),
        indentUnit.of("    "),
        indentOnInput(),
        bracketMatching(),
        pythonLanguage,
        syntaxHighlighting(classHighlighter),
        keymap.of([
          { key: "Mod-Enter", run: () => (onRun(), true) },
          ...defaultKeymap,
          ...historyKeymap,
          indentWithTab, // Escape, then Tab leaves the editor
        ]),
        EditorView.contentAttributes.of({
          "aria-label": label,
          "aria-description": "Control and Enter run it. Escape, then Tab leaves the editor.",
          autocapitalize: "off",
          spellcheck: "false",
        }),
        changed,
      ],
    }),
  });
  return {
    text: () => view.state.doc.toString(),
    set: (text) => view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text } }),
    firstLine(n) {
      if (n === first) return;
      first = n;
      view.dispatch({ effects: numbers.reconfigure(numbersFrom(first)) });
    },
  };
}
