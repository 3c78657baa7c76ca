"""What keeps a reader from using a page: text with too little contrast, controls without a name, targets too small to hit.

The rules are those of WCAG 2.2, level AA: contrast of 4.5, of 3 for large text (1.4.3); a name for each control (4.1.2);
targets of 24 pixels (2.5.8), but for the threads of a stepper: arrow keys lead to each, too.
"""

from typing import Any

# A colour may be rgb(), oklch() or a mix: a canvas knows them all. Backgrounds may be transparent, also that of a frame.
LOOK = r"""(() => {
  const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = {};
  function rgba(color) {
    if (known[color]) return known[color];
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = color;
    pixel.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
    return (known[color] = [r, g, b, a / 255]);
  }
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const linear = (x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  function background(element) {
    if (!element) return [255, 255, 255];
    const view = element.ownerDocument.defaultView;
    const color = rgba(view.getComputedStyle(element).backgroundColor);
    if (color[3] > 0.99) return color;
    return over(color, background(element.parentElement || view.frameElement));
  }
  function contrast(element, pseudo) {
    const style = element.ownerDocument.defaultView.getComputedStyle(element, pseudo);
    const below = background(element);
    const [a, b] = [light(over(rgba(style.color), below)), light(below)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    return (a + 0.05) / (b + 0.05) / (large ? 3 : 4.5);
  }
  const isShown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
    element.getBoundingClientRect().width > 1 && !element.closest("svg, [aria-disabled=true]");
  const label = (element) => `${element.tagName} .${element.className}: ${element.textContent.trim().slice(0, 40)}`;
  const found = [];
  const frames = [...document.querySelectorAll("iframe")].map((frame) => frame.contentDocument);
  for (const page of [document, ...frames.filter(Boolean)]) {
    const faint = {};
    const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const parent = texts.currentNode.parentElement;
      if (!texts.currentNode.data.trim() || !isShown(parent) || contrast(parent) >= 0.999) continue;
      faint[`${parent.tagName}.${parent.className}`] = `contrast ${contrast(parent).toFixed(2)} of 1: ${label(parent)}`;
    }
    const line = page.querySelector(".code-field pre div");
    if (line && contrast(line, "::before") < 1) faint.line = "contrast of the numbers of lines";
    found.push(...Object.values(faint));
    const controls = "a[href], button, input, select, textarea, progress, iframe, summary, [role=img], [contenteditable=true]";
    for (const control of page.querySelectorAll(controls)) {
      if (!isShown(control)) continue;
      const name = control.ariaLabel || control.title || control.labels?.[0]?.textContent || control.textContent || control.placeholder;
      if (!name?.trim()) found.push(`without a name: ${control.outerHTML.slice(0, 80)}`);
      const box = control.getBoundingClientRect(), isTarget = control.matches("button:not(.cell), select, input, summary");
      if (isTarget && Math.min(box.width, box.height) < 23.9) found.push(`a target of ${box.width} x ${box.height}: ${control.outerHTML.slice(0, 80)}`);
    }
  }
  return found;
})()"""


def barriers(browser: Any) -> list[str]:
    """Return what is wrong with the page that the browser shows, and with the pages in its frames."""
    return browser.evaluate(LOOK)
