"""The style of a page: light and dark, wide and narrow. Its security policy allows one script,
charts.js, and no request.

A live page may also ask its own server (live.py).
"""

import base64
import hashlib
import html
from pathlib import Path

SCRIPT = (Path(__file__).parent / "charts.js").read_text(encoding="utf-8")
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{HASH}'"
CSS = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2330; --soft: #5c6675; --line: #dde2ea;
  --card: #f6f8fb;
  --c0: #2563eb; --c1: #dc2626; --c2: #059669; --c3: #d97706; --c4: #7c3aed; --c5: #0891b2; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161d; --fg: #e4e8ef; --soft: #9aa5b5;
  --line: #2e3642;
  --card: #1a2029; --c0: #6ea0ff; --c1: #ff7b72; --c2: #3fd19b; --c3: #f0b04f; --c4: #b79bff;
  --c5: #4fd0e6; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 16px; max-width: 1180px; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6em; margin: .2em 0 } h2 { font-size: 1.2em; margin: 1.8em 0 .6em }
p, small, figcaption small { color: var(--soft) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(135px, 1fr)); gap: 10px;
  margin: 14px 0 }
.tiles div, .chart, details { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px }
.tiles div { padding: 8px 12px; color: var(--soft) }
.tiles b { display: block; font-size: 1.25em; color: var(--fg) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr));
  gap: 14px }
.chart { margin: 0; padding: 12px 14px 10px; min-width: 0 }
figcaption { font-weight: 600 } figcaption small { font-weight: 400 }
.plot { position: relative; height: 230px; margin: 12px 14px 26px 54px }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible }
.plot path { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round;
  vector-effect: non-scaling-stroke }
.plot .faint { stroke-width: 1; opacity: .35 } .plot .dots { stroke-width: 7 }
.plot .grid { stroke: var(--line); stroke-width: 1 }
.plot span { position: absolute; font-size: 12px; line-height: 1; color: var(--soft);
  white-space: nowrap }
.plot .y { right: calc(100% + 8px); transform: translateY(50%) }
.plot .x { top: calc(100% + 8px); transform: translateX(-50%) }
.plot { touch-action: pan-y } .plot:focus-visible { outline: 2px solid var(--c0);
  outline-offset: 4px }
.plot .cursor { position: absolute; inset: 0 auto 0 0; border-left: 1px solid var(--soft);
  pointer-events: none }
.plot .tip { position: absolute; top: 0; left: 0; z-index: 1; width: max-content;
  max-width: min(300px, 70vw); padding: 5px 9px;
  background: var(--bg); border: 1px solid var(--line); border-radius: 6px;
  box-shadow: 0 2px 8px #0003; pointer-events: none;
  font-size: 12px; line-height: 1.5 }
.tip .where { color: var(--soft) } .tip .row { display: flex; gap: 6px; align-items: center }
.tip i { flex: none; width: 10px; height: 3px } .tip em { flex: 1; font-style: normal;
  min-width: 0 }
.tip b { font-variant-numeric: tabular-nums; overflow-wrap: normal }
.axis { display: flex; flex-wrap: wrap; margin: 0 0 12px } .axis[hidden] { display: none }
.axis button { font: inherit; font-size: 14px; padding: 3px 12px; color: var(--fg);
  background: var(--card);
  border: 1px solid var(--line); margin-left: -1px; cursor: pointer }
.axis button:first-child { border-radius: 6px 0 0 6px; margin-left: 0 } .axis button:last-child {
  border-radius: 0 6px 6px 0 }
.axis button[aria-pressed=true] { background: var(--c0); border-color: var(--c0); color: var(--bg) }
.command { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 12px }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--soft) }
.legend i { display: inline-block; width: 12px; height: 3px; margin-right: 6px;
  vertical-align: middle }
.legend .faint { opacity: .35 } .legend .dots { width: 8px; height: 8px; border-radius: 4px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px } caption { text-align: left; font-weight: 600 }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line);
  vertical-align: top }
th, td:first-child { overflow-wrap: normal } td { min-width: 3.5em }
.num td:not(:first-child), .num th:not(:first-child) { text-align: right; overflow-wrap: normal;
  white-space: nowrap }
details { padding: 8px 12px; margin: 8px 0 } summary { cursor: pointer; font-weight: 600 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace;
  margin: 8px 0 }
.maps { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 8px }
.maps figure { margin: 0; font-size: 12px; color: var(--soft) } .maps figcaption {
  font-weight: 400 }
.map { display: block; image-rendering: pixelated; width: 112px; height: 112px;
  border: 1px solid var(--line) }
.maps .mean { display: grid; grid-template-columns: auto auto; gap: 3px 6px }
.maps .mean .map { width: var(--side); height: var(--side); outline: 1px solid var(--line);
  border: 0 }
.mean .columns, .maps .mean figcaption { grid-column: 2 } .mean .columns { display: flex;
  align-items: end }
.mean div span { display: block; font: 10px/11px ui-monospace, monospace; white-space: pre;
  overflow: hidden }
.mean .rows span { height: 11px; max-width: 60px; text-overflow: ellipsis; text-align: right }
.mean .columns span { width: 11px; max-height: 60px; writing-mode: vertical-rl;
  transform: rotate(180deg) }
.token { font: 13px ui-monospace, monospace; background: var(--bg); border: 1px solid var(--line);
  border-radius: 4px;
  padding: 0 4px; white-space: pre; display: inline-block; max-width: 16em; overflow: hidden;
  text-overflow: ellipsis;
  vertical-align: middle }
.next td { padding: 3px 10px 3px 0; white-space: nowrap; min-width: 0; vertical-align: middle }
  .bar { display: inline-block; height: 8px; background: var(--c0);
  border-radius: 2px; margin: 0 6px } .real { color: var(--c2); font-weight: 600 }
.configs { columns: 2 420px; column-gap: 32px } .configs > div { break-inside: avoid;
  overflow-x: auto; margin-bottom: 18px }
"""


def page(title: str, sections: list[str], live: str = "") -> str:
    """Return a whole HTML document.

    sections: HTML
    live: of a live page, the stamp of the content
    """
    name = html.escape(title)
    body = "\n".join(f"<section>{section}</section>" for section in sections if section or live)
    policy = POLICY + "; connect-src 'self'" * bool(live)
    state = ""
    if live:
        state = f'<p role="status" data-live="{html.escape(live)}">live</p>\n'
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{name}</title><style>{CSS}</style></head>\n<body>\n{state}<main>\n{body}\n</main>\n"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def table(columns: list[str], rows: list[list[str]], caption: str = "", kind: str = "") -> str:
    """Return an HTML table of text cells, or "" without rows.

    kind: "num" aligns all columns but the first to the right
    """
    if not rows:
        return ""
    cells = lambda row, tag: "".join(f"<{tag}>{html.escape(str(x))}</{tag}>" for x in row)
    if columns:
        head = f"<thead><tr>{cells(columns, 'th')}</tr></thead>"
    else:
        head = ""
    named = ""
    if caption:
        named = f"<caption>{html.escape(caption)}</caption>"
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{named}{head}<tbody>{body}</tbody></table></div>'


def tiles(items: list[tuple[str, str]]) -> str:
    """Return a row of (name, value) tiles."""
    shown = "".join(f"<div>{html.escape(k)}<b>{html.escape(v)}</b></div>" for k, v in items)
    return f'<div class="tiles">{shown}</div>'
