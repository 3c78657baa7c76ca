// A Web Worker with Python: it loads Pyodide, NumPy, xtrain and the judges, and runs what runtime.js asks for.
// Messages to it: {id, run: [code, file, options]} and {id, check: [number, text, file, seed]}.
// Messages from it: {progress}, {ready}, {failed}, {id, output}, {id, result}.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const SITE_PACKAGES = "/lib/python3.12/site-packages";
const MOST_OUTPUT = 200_000; // characters that a program may print: an endless loop prints more than a page can show
const BEGIN = performance.now();
const seconds = () => (performance.now() - BEGIN) / 1000;
let running; // the id of the request that runs
const printed = { waiting: "", length: 0, sent: 0 }; // of it: not sent yet, the length of all, when some was sent last

function progress(done, text) {
  postMessage({ progress: { done, of: 4, text, seconds: seconds() } });
}

function print(text) {
  if (printed.length > MOST_OUTPUT) return;
  printed.length += text.length + 1;
  printed.waiting +=
    printed.length > MOST_OUTPUT ? "(The rest of the output is not shown.)\n" : `${text}\n`;
  if (performance.now() - printed.sent > 100) sendOutput();
}

function sendOutput() {
  if (printed.waiting) postMessage({ id: running, output: printed.waiting });
  printed.waiting = "";
  printed.sent = performance.now();
}

async function archive(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  if (!answer.ok) throw new Error(`${name}: ${answer.status} ${answer.statusText}`);
  return answer.arrayBuffer();
}

async function load() {
  const archives = [archive("numpy.zip"), archive("xtrain.zip")]; // while Pyodide loads
  archives.forEach((promise) => promise.catch(() => {})); // reported below, where they are awaited
  progress(0, "Python");
  const python = await loadPyodide({
    indexURL: new URL("./pyodide/", import.meta.url).href,
    env: { HOME: "/home/pyodide", PYTHONDONTWRITEBYTECODE: "1" },
  });
  python.setStdout({ batched: print });
  python.setStderr({ batched: print });
  progress(1, "NumPy");
  python.unpackArchive(await archives[0], "zip", { extractDir: SITE_PACKAGES });
  progress(2, "the simulator and the judges");
  python.unpackArchive(await archives[1], "zip", { extractDir: SITE_PACKAGES });
  progress(3, "starting");
  const module = python.pyimport("in_browser");
  postMessage({ ready: true });
  return module;
}

const loaded = load();
loaded.catch((error) => postMessage({ failed: String(error.message || error) }));

self.onmessage = async ({ data }) => {
  const python = await loaded;
  running = data.id;
  printed.length = 0;
  let result;
  try {
    result = JSON.parse(data.run ? python.run(...data.run) : python.check(...data.check));
  } catch (error) {
    const text = String(error.message || error); // of Pyodide: it is out of memory, or the judge fails
    const broken = error.name !== "PythonError"; // nothing runs in it any more
    result = {
      ok: false,
      passed: false,
      error: text,
      text,
      pages: [],
      page: "",
      seconds: 0,
      broken,
    };
  }
  sendOutput();
  postMessage({ id: data.id, result });
};
