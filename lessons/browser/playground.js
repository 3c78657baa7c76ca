// The playground: a menu of programs, and links that hold a program in their fragment.
//
// #rotate.py is a program of the menu; #code= is followed by the program's text, deflated, in base64url.
"use strict";
{
  const { examples } = globalThis.playground;
  const root = document.querySelector(".stage"),
    menu = document.querySelector(".pick select"),
    stage = new Stage(root);
  const FIRST = stage.file,
    LONG = 8000, // characters of a link that programs for messages may cut
    LONGEST = 1_000_000; // that browsers open
  const through = async (bytes, stream) =>
    new Uint8Array(
      await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer(),
    );
  async function packed(text) {
    const bytes = await through(
      new TextEncoder().encode(text),
      new CompressionStream("deflate-raw"),
    );
    return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""))
      .replaceAll("+", "-")
      .replaceAll("/", "_")
      .replaceAll("=", "");
  }
  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) =>
      c.charCodeAt(0),
    );
    return new TextDecoder("utf-8", { fatal: true }).decode(
      await through(bytes, new DecompressionStream("deflate-raw")),
    );
  }

  // What the reader writes stays with this entry of the browser's history: over a reload, and with the back button.
  let timer;
  function remember() {
    clearTimeout(timer);
    const source = stage.field.value === stage.original ? null : stage.field.value;
    history.replaceState(source === null ? null : { source }, "");
  }
  for (const name of ["edit", "shown"])
    root.addEventListener(name, () => {
      clearTimeout(timer);
      timer = setTimeout(remember, 300);
    });
  addEventListener("pagehide", remember);

  // The program of a link, packed. What programs for messages do to a link is undone: "=" as "%3D", a full stop behind it.
  const shared = (fragment) => fragment.match(/^code(?:=|%3D)([\w-]*)/i)?.[1];
  const named = (fragment) => examples.find((e) => e.file === (fragment || FIRST));

  // Show the program of the address, or what the reader has made of it.
  async function open() {
    clearTimeout(timer);
    const fragment = location.hash.slice(1),
      written = history.state?.source;
    if (shared(fragment) !== undefined) await openShared(shared(fragment));
    else {
      const chosen = named(fragment) || named(FIRST);
      menu.value = chosen.file;
      stage.load(chosen.file, chosen.source, chosen);
    }
    if (typeof written === "string") stage.write(written);
  }

  async function openShared(text) {
    try {
      stage.load("kernel.py", await unpacked(text), null);
      menu.value = "";
      stage.say("", "This program came with the link. Read it, then press Run.");
    } catch {
      stage.say(
        "bad",
        "The link is damaged: its program cannot be read. Ask for it again, or choose a program above.",
      );
    }
  }
  menu.addEventListener("change", () => {
    remember();
    location.hash = menu.value;
  });
  addEventListener("hashchange", () => {
    const fragment = location.hash.slice(1);
    if (shared(fragment) !== undefined || named(fragment)) open();
    else remember(); // a heading of this page: the program stays
  });

  const button = root.querySelector("[data-do=link]");
  button.addEventListener("click", async () => {
    const fragment = `#code=${await packed(stage.field.value)}`;
    if (fragment.length > LONGEST)
      return stage.say("bad", "This program is too long for a link: send it as a file.");
    history.replaceState(history.state, "", fragment);
    const copied = await navigator.clipboard?.writeText(location.href).then(
      () => true,
      () => false,
    );
    button.textContent = copied ? "Copied" : "It is in the address bar";
    if (fragment.length > LONG)
      stage.say(
        "",
        `The link has ${location.href.length.toLocaleString("en")} characters. Programs for messages may cut it: try it before you rely on it.`,
      );
    setTimeout(() => {
      button.textContent = "Copy a link";
    }, 2000);
  });
  menu.value = FIRST; // what the page shows if the link is damaged
  open();
}
