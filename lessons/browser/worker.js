// A Web Worker with Python: it loads Pyodide, NumPy, xtrain and the judges, and runs what runtime.js asks for.
// Messages to it: {id, run: [code, file, options]} and {id, check: [number, text, file, seed]}.
// Messages from it: {progress}, {ready: seconds}, {failed}, {id, output}, {id, result}.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const SITE_PACKAGES = "/lib/python3.12/site-packages";
const BEGIN = performance.now();
const seconds = () => (performance.now() - BEGIN) / 1000;
let running; // the id of the request that runs

function progress(done, text) {
  postMessage({ progress: { done, of: 4, text, seconds: seconds() } });
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
  const output = { batched: (text) => postMessage({ id: running, output: `${text}\n` }) };
  python.setStdout(output);
  python.setStderr(output);
  progress(1, "NumPy");
  python.unpackArchive(await archives[0], "zip", { extractDir: SITE_PACKAGES });
  progress(2, "the simulator and the judges");
  python.unpackArchive(await archives[1], "zip", { extractDir: SITE_PACKAGES });
  progress(3, "starting");
  const module = python.pyimport("in_browser");
  postMessage({ ready: seconds() });
  return module;
}

const loaded = load();
loaded.catch((error) => postMessage({ failed: String(error.message || error) }));

self.onmessage = async ({ data }) => {
  const python = await loaded;
  running = data.id;
  const text = data.run ? python.run(...data.run) : python.check(...data.check);
  postMessage({ id: data.id, result: JSON.parse(text) });
};
