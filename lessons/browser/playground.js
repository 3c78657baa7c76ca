// The playground: a menu of programs, and links that hold a program in their fragment.
//
// #rotate.py is a program of the menu; #code= is followed by the program's text, deflated, in base64url.
"use strict";
{
  const { examples } = globalThis.playground;
  const root = document.querySelector(".stage"),
    menu = document.querySelector(".pick select"),
    stage = new Stage(root);
  const through = async (bytes, stream) =>
    new Uint8Array(
      await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer(),
    );
  async function packed(text) {
    const bytes = await through(
      new TextEncoder().encode(text),
      new CompressionStream("deflate-raw"),
    );
    return btoa(String.fromCharCode(...bytes))
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

  async function open() {
    const fragment = location.hash.slice(1),
      shared = fragment.startsWith("code=");
    const chosen =
      examples.find((e) => e.file === fragment) ||
      (!shared && examples.find((e) => e.file === menu.value));
    if (chosen) {
      menu.value = chosen.file;
      return stage.load(chosen.file, chosen.source, chosen);
    }
    try {
      const source = await unpacked(fragment.slice(5));
      menu.selectedIndex = -1;
      stage.load("kernel.py", source, null);
      stage.say("", "This program came with the link. Read it, then press Run.");
    } catch {
      stage.say(
        "bad",
        "The link is damaged: its program cannot be read. Ask for it again, or choose a program above.",
      );
    }
  }
  menu.value = stage.file;
  menu.addEventListener("change", () => {
    location.hash = menu.value;
  });
  addEventListener("hashchange", () => {
    if (location.hash.slice(1) !== stage.written) open();
  });

  const button = root.querySelector("[data-do=link]");
  button.addEventListener("click", async () => {
    stage.written = `code=${await packed(stage.field.value)}`;
    history.replaceState(null, "", `#${stage.written}`);
    let copied = true;
    await navigator.clipboard?.writeText(location.href).catch(() => {
      copied = false;
    });
    button.textContent = copied && navigator.clipboard ? "Copied" : "It is in the address bar";
    setTimeout(() => {
      button.textContent = "Copy a link";
    }, 2000);
  });
  open();
}
