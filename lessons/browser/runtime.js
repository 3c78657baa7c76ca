// Python in a Web Worker (worker.js), for pages that run kernels and check exercises.
//
//   const runtime = await start({ onProgress: ({ text, seconds, done, of }) => ... });
//   const { ok, error, page } = await runtime.run(code, { onOutput: (text) => ... });
//   const { passed, text, page } = await runtime.check("1.1", fileText, { file: "01_threads" });
//   runtime.stop();   // also an endless loop: the worker is ended, and another one loads
//
// start({ confined: true }) is for programs that others have written: they can send nothing to another site.

const WORKER = new URL("./worker.js", import.meta.url);
// What the page, and a worker that is made from its text, may do from the first confined start on. Another worker from an address
// of this site would not inherit it, so there is none.
const POLICY =
  "connect-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; worker-src blob:";

function confinedWorker() {
  if (!document.querySelector("meta[http-equiv=Content-Security-Policy]")) {
    const meta = document.createElement("meta");
    meta.httpEquiv = "Content-Security-Policy";
    meta.content = POLICY;
    document.head.append(meta);
  }
  // A static import would count as a worker from an address of this site.
  const text = `import(${JSON.stringify(WORKER.href)}).catch((error) => postMessage({ failed: error.message }));`;
  const address = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  const worker = new Worker(address, { type: "module" });
  setTimeout(() => URL.revokeObjectURL(address), 60_000); // when the worker has read it
  return worker;
}

const failure = (why) =>
  new Error(
    `Python could not be loaded (${why}): look whether you are online, and press the button again.`,
  );

class Runtime {
  #worker;
  #ready; // the promise that the worker can be used
  #settle; // its resolve
  #waiting = new Map(); // id of a request -> {resolve, reject, onOutput}
  #number = 0;
  #onProgress;
  #confined;

  constructor(onProgress, confined) {
    this.#onProgress = onProgress;
    this.#confined = confined;
    this.#start();
  }

  get ready() {
    return this.#ready;
  }

  #start() {
    const worker = this.#confined ? confinedWorker() : new Worker(WORKER, { type: "module" });
    this.#worker = worker;
    this.#ready = new Promise((resolve, reject) => {
      this.#settle = resolve;
      worker.onmessage = ({ data }) => {
        if (data.progress) this.#onProgress(data.progress);
        else if (data.failed) reject(failure(data.failed));
        else if (data.ready) resolve(this);
        else this.#answer(data);
      };
      worker.onerror = (event) => {
        event.preventDefault();
        reject(failure(event.message || "worker.js is missing"));
      };
    });
    this.#ready.catch(() => {
      // each await of it raises the error
      worker.terminate();
      if (runtime === this) runtime = undefined;
    });
  }

  #answer({ id, output, result }) {
    const request = this.#waiting.get(id);
    if (!request) return;
    if (output !== undefined) return request.onOutput(output);
    this.#waiting.delete(id);
    request.resolve({ ...result, stopped: false });
    if (result.broken) this.stop();
  }

  async #ask(message, onOutput = () => {}) {
    const id = ++this.#number;
    const answer = new Promise((resolve) => this.#waiting.set(id, { resolve, onOutput }));
    const worker = this.#worker;
    await Promise.race([this.#ready, answer]); // stop() answers a request that still waits
    if (this.#waiting.has(id)) worker.postMessage({ id, ...message });
    return answer;
  }

  // Run a program. options: arguments of xtrain.simulator.simulate, such as { enable: ["bank_conflict"] }.
  run(code, { onOutput, file = "program.py", options = {} } = {}) {
    return this.#ask({ run: [code, file, JSON.stringify(options)] }, onOutput);
  }

  // Judge an exercise. passed: null if there is no verdict, because the file is not Python. text: the reader's whole file, as `xtrain lesson check` reads it. file: its name without .py.
  check(number, text, { file, seed, onOutput } = {}) {
    return this.#ask({ check: [number, text, file, seed] }, onOutput);
  }

  // End what runs. Its promise resolves with stopped: true.
  stop() {
    this.#worker.terminate();
    const settle = this.#settle;
    const text = "Stopped.";
    const stopped = { ok: false, passed: null, error: text, text, page: "", stopped: true };
    for (const { resolve } of this.#waiting.values()) resolve(stopped);
    this.#waiting.clear();
    this.#start();
    settle(this.#ready); // a load that ended here: its callers wait for the new one
  }
}

let runtime; // one for a page
const listeners = new Set();

// Load Python, or return the runtime that the page has. A later call tries again what has failed, also after a stop.
export function start({ onProgress = () => {}, confined = false } = {}) {
  listeners.add(onProgress);
  runtime ??= new Runtime(
    (progress) => listeners.forEach((listener) => listener(progress)),
    confined,
  );
  return runtime.ready;
}
