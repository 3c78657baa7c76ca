// Python as in the browser, in Node.js:  node verdicts.mjs FOLDER CASES.json > VERDICTS.json
// FOLDER: what lessons/tools/browser.py has written. CASES: [[exercise, text of the file, its name, seed]].

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, cases] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide/pyodide.mjs`));
const python = await loadPyodide({ env: { HOME: "/home/pyodide", PYTHONDONTWRITEBYTECODE: "1" } });
for (const name of ["numpy.zip", "xtrain.zip"]) {
  const bytes = new Uint8Array(readFileSync(`${folder}/${name}`));
  python.unpackArchive(bytes, "zip", { extractDir: "/lib/python3.12/site-packages" });
}
const module = python.pyimport("in_browser");
const verdicts = JSON.parse(readFileSync(cases)).map((given) => JSON.parse(module.check(...given)));
process.stdout.write(JSON.stringify(verdicts), () => process.exit(0));
