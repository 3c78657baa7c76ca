// The reader's files and the exercises that passed, in the browser's storage. Nothing is sent anywhere.
//
// A file is kept as its pieces: the text before the first exercise, and one text for each cell. One that is as the lesson had it
// is {lesson: text}: it follows the lesson when the site is built again. An imported file is kept as one text until its page
// cuts it (cut).

const FILE = "xtrain/file/"; // and the name: 01_threads
const PASSED = "xtrain/passed"; // ["1.1", ...], what my_lessons/passed.txt has

const unkept = new Map(); // what the storage has refused: a private window, or it is full. It ends with the page.
const ask = (event) => event.preventDefault(); // before the page is left

function read(key, otherwise) {
  try {
    return JSON.parse(unkept.get(key) ?? localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // no storage here, or not ours
  }
}

function write(key, value) {
  const text = JSON.stringify(value);
  try {
    localStorage.setItem(key, text);
    unkept.delete(key);
  } catch {
    unkept.set(key, text);
  }
  if (unkept.size) addEventListener("beforeunload", ask);
  else removeEventListener("beforeunload", ask);
  return !unkept.has(key);
}

// The names of what is kept here, of this site.
function keys() {
  let stored = [];
  try {
    stored = Object.keys(localStorage);
  } catch {} // the storage is closed
  return [...new Set([...stored, ...unkept.keys()])].filter((key) => key.startsWith("xtrain/"));
}

const textOf = (piece) => piece?.lesson ?? piece;
const isTexts = (value) =>
  Array.isArray(value) && value.every((piece) => typeof textOf(piece) === "string");

export function passed() {
  const kept = read(PASSED, []);
  return new Set(Array.isArray(kept) ? kept.filter((number) => typeof number === "string") : []);
}

// The verdict on an exercise. Returns whether it is kept.
export function note(number, ok) {
  const now = passed();
  if (ok) now.add(number);
  else now.delete(number);
  return write(PASSED, inOrder(now));
}

function inOrder(numbers) {
  const parts = (number) => number.split(".").map(Number);
  return [...numbers].sort((a, b) => parts(a)[0] - parts(b)[0] || parts(a)[1] - parts(b)[1]);
}

// The file as it is on a disk: as `xtrain lesson start` joins the cells.
export const joined = (pieces) => pieces.filter(Boolean).join("\n\n\n") + "\n";

// The line of the file on which each piece begins.
export function firstLines(pieces) {
  let line = 1;
  return pieces.map((piece) => {
    const begin = line;
    if (piece) line += piece.split("\n").length + 2;
    return begin;
  });
}

// The pieces of a file's text. about: of each piece {name: its first function, text: as the lesson has it}; about[0] is the
// text before them. A piece begins at its function, with the decorators and comments above it.
export function cut(text, about) {
  const lines = text.split("\n");
  const begins = about.map(({ name, text: given }, i) => {
    if (i === 0) return 0;
    let at = lines.findIndex((line) => new RegExp(`^(def|class) ${name}\\b`).test(line));
    if (!name) at = lines.indexOf(given.split("\n")[0]);
    while (at > 0 && /^[@#]/.test(lines[at - 1])) at -= 1;
    return at;
  });
  return about.map((_, i) => {
    if (begins[i] < 0) return ""; // the reader has removed it
    const end = Math.min(lines.length, ...begins.filter((begin) => begin > begins[i]));
    return lines.slice(begins[i], end).join("\n").trim();
  });
}

// The pieces of the reader's file, or those of the lesson.
export function pieces(name, about) {
  const kept = read(FILE + name, null);
  if (typeof kept === "string") return cut(kept, about);
  if (!isTexts(kept)) return about.map(({ text }) => text);
  if (kept.length === about.length)
    return kept.map((piece, i) => (typeof piece === "string" ? piece : about[i].text));
  return cut(joined(kept.map(textOf)), about).map((piece, i) => piece || about[i].text); // the lesson has other exercises than it had
}

export function keep(name, pieces, about) {
  const kept = pieces.map((text, i) => (text === about[i].text ? { lesson: text } : text));
  return write(FILE + name, kept);
}

// Call a function when another page has kept this file, and one when it has kept what has passed.
export function watch(name, fileChanged, passedChanged) {
  addEventListener("storage", ({ key }) => {
    if (key === PASSED || key === null) passedChanged();
    if (key === FILE + name || key === null) fileChanged();
  });
  addEventListener("pageshow", ({ persisted }) => {
    if (!persisted) return;
    passedChanged(); // with the back button; meanwhile the page heard nothing of other tabs
    fileChanged();
  });
}

// ------------------------------------------------------------------ my_lessons/ as a zip archive, and back

function files() {
  const found = {};
  for (const key of keys().sort()) {
    const kept = key.startsWith(FILE) ? read(key, null) : null;
    const text = isTexts(kept) ? joined(kept.map(textOf)) : kept;
    if (typeof text === "string") found[`${key.slice(FILE.length)}.py`] = text;
  }
  found["passed.txt"] = inOrder(passed())
    .map((number) => `${number}\n`)
    .join("");
  return found;
}

export function exported() {
  const named = Object.entries(files()).map(([name, text]) => [`my_lessons/${name}`, text]);
  return new Blob([zip(named)], { type: "application/zip" });
}

// The texts of the reader's files by name: of .py, passed.txt, or a zip archive with them. Nothing is kept yet.
export async function opened(list) {
  const found = {};
  for (const file of list) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const members = /\.zip$/i.test(file.name) ? await unzip(bytes) : [[file.name, bytes]];
    for (const [path, content] of members) {
      const name = path.split("/").pop();
      if (/^\d\d_\w+\.py$/.test(name) || name === "passed.txt")
        found[name] = decoded(name, content);
    }
  }
  return found;
}

function decoded(name, bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes).replace(/\r\n?/g, "\n");
  } catch {
    throw new Error(`${name} is not text in UTF-8: save it as UTF-8, and open it again.`);
  }
}

// The names of those that would replace another text.
export function replaced(texts) {
  const mine = files();
  return Object.keys(texts).filter(
    (name) => name in mine && name !== "passed.txt" && mine[name] !== texts[name],
  );
}

// Keep them all, or none: raises an error if the storage is full. What has passed is added to what has passed here.
export function imported(texts) {
  const before = keys().map((key) => [key, read(key, null)]);
  const kept = Object.entries(texts).every(([name, text]) => {
    if (name !== "passed.txt") return write(FILE + name.slice(0, -3), text);
    return write(PASSED, inOrder(new Set([...passed(), ...(text.match(/^\d+\.\d+$/gm) ?? [])])));
  });
  if (kept) return;
  for (const name of Object.keys(texts))
    remove(name === "passed.txt" ? PASSED : FILE + name.slice(0, -3));
  for (const [key, value] of before) write(key, value);
  throw new Error("Nothing was opened: this browser's storage is full or closed.");
}

function remove(key) {
  unkept.delete(key);
  try {
    localStorage.removeItem(key);
  } catch {} // the storage is closed
}

const encode = (text) => new TextEncoder().encode(text);
const decode = (bytes) => new TextDecoder().decode(bytes);

const CRC = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function crc32(bytes) {
  let value = 0xffffffff;
  for (const byte of bytes) value = (value >>> 8) ^ CRC[(value ^ byte) & 255];
  return ~value >>> 0;
}

// Little-endian numbers: fields("2", 20) is two bytes, "4" four.
function fields(sizes, ...values) {
  const bytes = [];
  values.forEach((value, i) => {
    for (let k = 0; k < Number(sizes[i]); k++) bytes.push((value >>> (8 * k)) & 255);
  });
  return bytes;
}

// A zip archive of [[name, text]], stored without compression. APPNOTE.TXT 4.3 has the fields.
export function zip(named) {
  const body = [];
  const directory = [];
  let offset = 0;
  const now = new Date();
  const time = (now.getHours() << 11) | (now.getMinutes() << 5) | (now.getSeconds() >> 1);
  const date = ((now.getFullYear() - 1980) << 9) | ((now.getMonth() + 1) << 5) | now.getDate();
  for (const [path, text] of named) {
    const name = encode(path);
    const data = encode(text);
    const same = fields("2222444", 0x800, 0, time, date, crc32(data), data.length, data.length); // 0x800: names are UTF-8
    const head = [
      ...fields("42", 0x04034b50, 20),
      ...same,
      ...fields("22", name.length, 0),
      ...name,
    ];
    directory.push(
      ...fields("422", 0x02014b50, 20, 20),
      ...same,
      ...fields("2222244", name.length, 0, 0, 0, 0, 0, offset),
      ...name,
    );
    body.push(Uint8Array.from(head), data);
    offset += head.length + data.length;
  }
  const count = named.length;
  const end = fields("42222442", 0x06054b50, 0, 0, count, count, directory.length, offset, 0);
  return concatenated([...body, Uint8Array.from(directory), Uint8Array.from(end)]);
}

function concatenated(parts) {
  const whole = new Uint8Array(parts.reduce((length, part) => length + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

// [[name, bytes]] of a zip archive, also of a compressed one. Raises an error if a file in it is damaged.
export async function unzip(bytes) {
  try {
    return await entries(bytes);
  } catch {
    throw new Error(
      "This is not a zip archive, or it is damaged: save it again, or choose the files in it.",
    );
  }
}

async function entries(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset);
  const two = (at) => view.getUint16(at, true);
  const four = (at) => view.getUint32(at, true);
  let end = bytes.length - 22;
  while (end >= 0 && four(end) !== 0x06054b50) end -= 1;
  if (end < 0) throw new Error("no end of a directory");
  const found = [];
  let at = four(end + 16);
  for (let i = 0; i < two(end + 10); i++) {
    const length = two(at + 28);
    const name = decode(bytes.subarray(at + 46, at + 46 + length));
    const local = four(at + 42);
    const begin = local + 30 + two(local + 26) + two(local + 28);
    const data = bytes.subarray(begin, begin + four(at + 20));
    const content = two(at + 10) ? await inflated(data) : data;
    if (crc32(content) !== four(at + 16)) throw new Error(`${name} has another checksum`);
    if (!name.endsWith("/")) found.push([name, content]);
    at += 46 + length + two(at + 30) + two(at + 32);
  }
  return found;
}

async function inflated(data) {
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
