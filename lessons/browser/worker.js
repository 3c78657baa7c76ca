// A Web Worker with Python: it loads Pyodide, NumPy, xtrain and the judges, and runs what runtime.js asks for.
// Messages to it: {id, run: [code, file, options]} and {id, check: [number, text, file, seed]}.
// Messages from it: {progress}, {ready}, {failed}, {id, output}, {id, result}.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const SITE_PACKAGES = "/lib/python3.12/site-packages";
const MOST_OUTPUT = 200_000; // bytes that a program may print: an endless loop prints more than a page can show
const TOO_DEEP =
  "RecursionError: a function calls itself without an end, or more often than the stack of a browser allows.";
const BEGIN = performance.now();
const seconds = () => (performance.now() - BEGIN) / 1000;
let running; // the id of the request that runs
const AT_ONCE = 200; // messages with output that do not wait: an endless loop may follow a line
const printed = { waiting: "", length: 0, sent: 0, messages: 0 }; // of it: not sent yet, the length of all, when some was sent last

function progress(done, text) {
  postMessage({ progress: { done, of: 4, text, seconds: seconds() } });
}

// What Python calls with the bytes of one of its streams.
function writer() {
  const decoder = new TextDecoder(); // a character may arrive in two parts
  return (bytes) => {
    const room = MOST_OUTPUT - printed.length;
    if (room >= 0) printed.waiting += decoder.decode(bytes.subarray(0, room), { stream: true });
    if (room >= 0 && bytes.length > room) {
      decoder.decode(); // forget the first part of a character that was cut, or the next run would begin with it
      printed.waiting += "\n(The rest of the output is not shown.)\n";
    }
    printed.length += bytes.length;
    if (printed.messages < AT_ONCE || performance.now() - printed.sent > 100) sendOutput();
    return bytes.length;
  };
}

function sendOutput() {
  if (!printed.waiting) return;
  postMessage({ id: running, output: printed.waiting });
  printed.waiting = "";
  printed.messages += 1;
  printed.sent = performance.now();
}

async function archive(name) {
  const answer = await fetch(new URL(name, import.meta.url)).catch((error) => {
    throw new Error(`${name}: ${error.message}`);
  });
  if (!answer.ok) throw new Error(`${name}: ${answer.status} ${answer.statusText}`);
  return answer.arrayBuffer();
}

// Rejects when Pyodide writes an error to the console: if a file of it does not arrive, that is all it does, and it waits forever.
const failure = new Promise((_, reject) => {
  for (const kind of ["warn", "error"])
    console[kind] = (...words) => words.forEach((word) => word instanceof Error && reject(word));
});
failure.catch(() => {}); // reported below

async function load() {
  const archives = [archive("numpy.zip"), archive("xtrain.zip")]; // while Pyodide loads
  archives.forEach((promise) => promise.catch(() => {})); // reported below, where they are awaited
  progress(0, "Python");
  const pyodide = loadPyodide({
    indexURL: new URL("./pyodide/", import.meta.url).href,
    env: { HOME: "/home/pyodide", PYTHONDONTWRITEBYTECODE: "1" },
  });
  const python = await Promise.race([pyodide, failure]);
  python.setStdout({ write: writer() });
  python.setStderr({ write: writer() });
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
  printed.messages = 0;
  let result;
  try {
    result = JSON.parse(data.run ? python.run(...data.run) : python.check(...data.check));
  } catch (error) {
    const text = error instanceof RangeError ? TOO_DEEP : String(error.message || error); // out of memory, or the judge fails
    const broken = error.name !== "PythonError"; // nothing runs in it any more
    result = { ok: false, passed: null, error: text, text, page: "", seconds: 0, broken };
  }
  sendOutput();
  postMessage({ id: data.id, result });
};
