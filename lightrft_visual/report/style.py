"""Look and behaviour of report.html: one style sheet and one small script, both inside the file."""

from __future__ import annotations

import base64
import hashlib

from .charts import BOTTOM, LEFT, RIGHT, TOP
from .markup import Markup, join, tag

STYLE = """
:root { --paper:#fafaf9; --card:#fff; --ink:#1c1917; --soft:#57534e; --faint:#a8a29e; --line:#e7e5e4; --accent:#4269d0;
  --good:#15803d; --bad:#b91c1c; --wash:#f5f5f4; }
@media (prefers-color-scheme: dark) { :root { --paper:#161514; --card:#201f1d; --ink:#f2f0ee; --soft:#b8b2ab;
  --faint:#78716c; --line:#35322f; --accent:#8aa6f0; --good:#4ade80; --bad:#f87171; --wash:#2a2826; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif; }
main { max-width:1180px; margin:0 auto; padding:28px 24px 80px; }
h1 { font-size:27px; letter-spacing:-.02em; margin:0 0 2px; overflow-wrap:anywhere; }
h2 { font-size:19px; letter-spacing:-.01em; margin:40px 0 4px; }
h3 { font-size:14px; margin:22px 0 8px; color:var(--soft); font-weight:600; }
p { margin:4px 0 10px; } .soft { color:var(--soft); } .small { font-size:13px; }
nav { display:flex; gap:16px; margin-top:10px; font-size:13.5px; flex-wrap:wrap; }
nav a { color:var(--accent); text-decoration:none; }
.card { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:14px 16px; min-width:0; }
.tiles { display:grid; grid-template-columns:repeat(auto-fill,minmax(165px,1fr)); gap:12px; margin:20px 0 4px; }
.tile b { display:block; font-size:22px; letter-spacing:-.02em; font-variant-numeric:tabular-nums; font-weight:650; }
.tile span { font-size:12.5px; color:var(--soft); }
.tile .from { color:var(--faint); font-weight:400; font-size:16px; }
.grid { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(350px,100%),1fr)); gap:14px; margin-top:12px; }
.panel header { display:flex; justify-content:space-between; gap:10px; align-items:baseline; }
.panel header b { font-weight:600; font-size:14px; overflow-wrap:anywhere; }
.panel header span { font-variant-numeric:tabular-nums; color:var(--soft); font-size:13px; white-space:nowrap; }
.legend { display:flex; flex-wrap:wrap; gap:2px 12px; font-size:12px; color:var(--soft); margin:2px 0; }
.chip i { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:5px; }
svg.chart { width:100%; height:auto; display:block; overflow:hidden; }
svg.chart text { font-size:10.5px; fill:var(--faint); font-variant-numeric:tabular-nums; }
svg .grid { stroke:var(--line); stroke-width:1; } svg .axis { stroke:var(--faint); stroke-width:1; }
svg .raw { stroke-width:1; opacity:.28; } svg .main { stroke-width:2; stroke-linejoin:round; }
svg .layer { opacity:.85; } svg .cursor { stroke:var(--faint); stroke-dasharray:3 3; }
.scroll { overflow-x:auto; margin:10px 0; }
table { border-collapse:collapse; font-size:13.5px; font-variant-numeric:tabular-nums; width:100%; }
th { text-align:left; font-weight:600; color:var(--soft); border-bottom:1px solid var(--line); padding:6px 12px 6px 0; }
td { border-bottom:1px solid var(--line); padding:6px 12px 6px 0; vertical-align:top; overflow-wrap:anywhere; }
td.n, th.n { text-align:right; white-space:nowrap; } td.up { color:var(--good); } td.down { color:var(--bad); }
.share { display:flex; height:26px; border-radius:7px; overflow:hidden; margin:12px 0 6px; gap:1px; }
.share i { display:block; min-width:1px; }
.two { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr)); gap:14px; margin-top:12px; }
details { border:1px solid var(--line); border-radius:10px; background:var(--card); margin:10px 0; padding:0 16px; }
details[open] { padding-bottom:14px; }
summary { cursor:pointer; padding:11px 0; font-weight:600; } summary span { color:var(--soft); font-weight:400; }
.rollouts { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(330px,100%),1fr)); gap:12px; }
.rollout { border:1px solid var(--line); border-radius:9px; overflow:hidden; display:flex; flex-direction:column; }
.pictures { background:var(--wash); display:flex; gap:6px; justify-content:center; align-items:center; padding:10px;
  min-height:92px; flex-wrap:wrap; }
.pictures img { max-width:100%; max-height:230px; border-radius:4px; } .pictures img.tiny { image-rendering:pixelated; }
.pictures .missing { color:var(--faint); font-size:12.5px; }
.rollout .words { padding:10px 12px 12px; font-size:13.5px; display:flex; flex-direction:column; gap:7px; flex:1; }
.rollout .score { display:flex; align-items:center; gap:8px; font-variant-numeric:tabular-nums; font-weight:650; }
.bar { flex:1; height:6px; background:var(--wash); border-radius:3px; overflow:hidden; }
.bar i { display:block; height:100%; background:var(--accent); border-radius:3px; }
.k { color:var(--faint); font-size:11px; text-transform:uppercase; letter-spacing:.06em; display:block; }
.text { white-space:pre-wrap; overflow-wrap:anywhere; max-height:180px; overflow-y:auto; }
.answer { background:var(--wash); border-radius:6px; padding:6px 9px; }
.special { color:var(--faint); font-size:11px; border:1px solid var(--line); border-radius:4px; padding:0 4px; }
.role { color:var(--accent); font-size:11px; margin-right:6px; }
.parts { display:flex; flex-wrap:wrap; gap:2px 12px; font-size:12.5px; color:var(--soft); margin-top:auto; }
.sheet { max-width:100%; border-radius:6px; border:1px solid var(--line); }
pre { background:var(--wash); border-radius:8px; padding:12px 14px; overflow:auto; font-size:12.5px; max-height:420px;
  white-space:pre-wrap; overflow-wrap:anywhere; margin:8px 0; }
#tip { position:fixed; pointer-events:none; background:var(--ink); color:var(--paper); font-size:12px; padding:5px 9px;
  border-radius:6px; display:none; z-index:9; font-variant-numeric:tabular-nums; max-width:280px; }
#tip i { display:inline-block; width:8px; height:8px; border-radius:2px; margin-right:6px; }
footer { margin-top:50px; color:var(--faint); font-size:12.5px; }
@media print { details { break-inside:avoid; } .panel { break-inside:avoid; } }
"""

# Values under the pointer: read back from the lines' own pixels, so that the file does not hold its data twice.
SCRIPT = (
    f"const LEFT = {LEFT}, RIGHT = {RIGHT}, TOP = {TOP}, BOTTOM = {BOTTOM};"
    + """
(() => {
  const tip = document.getElementById('tip');
  const show = v => Math.abs(v) >= 1e4 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : +v.toPrecision(4);
  document.querySelectorAll('svg.chart').forEach(svg => {
    const d = svg.dataset, box = svg.viewBox.baseVal, cursor = svg.querySelector('.cursor');
    const x0 = +d.x0, x1 = +d.x1, left = LEFT, right = box.width - RIGHT, top = TOP, bottom = box.height - BOTTOM;
    const log = d.log !== undefined, lg = v => log ? Math.log10(v) : v;
    const y0 = lg(+d.y0), y1 = lg(+d.y1);
    const lines = [...svg.querySelectorAll('.main')].map(line => ({ name: line.dataset.name, color: line.dataset.color,
      points: line.getAttribute('points').split(' ').map(p => p.split(',').map(Number)) }));
    if (!lines.length) return;
    svg.addEventListener('mousemove', event => {
      const area = svg.getBoundingClientRect(), at = (event.clientX - area.left) / area.width * box.width;
      let nearest = null;
      const rows = lines.map(line => {
        const p = line.points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
        if (nearest === null || Math.abs(p[0] - at) < Math.abs(nearest - at)) nearest = p[0];
        let v = y0 + (bottom - p[1]) / (bottom - top) * (y1 - y0);
        return [line.name, line.color, log ? 10 ** v : v];
      });
      tip.textContent = '';
      const head = document.createElement('div');
      head.textContent = 'step ' + Math.round(x0 + (nearest - left) / (right - left) * (x1 - x0));
      tip.append(head);
      rows.forEach(([name, color, value]) => {
        const row = document.createElement('div'), dot = document.createElement('i');
        dot.style.background = color;
        row.append(dot, name + '  ' + show(value));
        tip.append(row);
      });
      tip.style.display = 'block';
      tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
      tip.style.top = event.clientY + 14 + 'px';
      cursor.setAttribute('x1', nearest); cursor.setAttribute('x2', nearest);
    });
    svg.addEventListener('mouseleave', () => {
      tip.style.display = 'none'; cursor.setAttribute('x1', -9); cursor.setAttribute('x2', -9);
    });
  });
})();
"""
)


def policy() -> str:
    """Content security policy: nothing is fetched from anywhere, and no script but ours runs."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def page(title: str, body: Markup) -> Markup:
    """The whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    content = tag("body", tag("main", body), tag("div", id="tip"), tag("script", Markup(SCRIPT)))
    return join([Markup("<!doctype html>\n"), tag("html", head, content, lang="en"), Markup("\n")])
