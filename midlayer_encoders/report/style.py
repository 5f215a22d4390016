"""How the page looks: on a phone, on a desk, in the dark, on paper."""

from __future__ import annotations

__all__ = ["CSS", "DASHES", "SERIES"]

SERIES = ("#0072b2", "#d55e00", "#008060", "#b8518b", "#5a5a5a")
"""Colours of curves on white: after Okabe and Ito, safe for the colour-blind, darkened to a contrast of 3 or more."""

_SERIES_DARK = ("#62b8ee", "#ff9a4d", "#3fd0a4", "#ec9fcb", "#c8c8c8")

DASHES = ("", "6 3", "2 3", "8 3 2 3")
"""Dashes of curves once the colours are used up, as SVG writes them."""


def _series_rules() -> str:
    """Return the CSS of every style number: colours change first, then dashes."""
    rules = [
        f".s{dash * len(SERIES) + colour} {{ --c: var(--s{colour});{f' --dash: {pattern};' if pattern else ''} }}"
        for dash, pattern in enumerate(DASHES)
        for colour in range(len(SERIES))
    ]
    return "\n".join(rules)


def _variables(colours: tuple[str, ...]) -> str:
    return " ".join(f"--s{number}: {colour};" for number, colour in enumerate(colours))


CSS = f"""
:root {{
  color-scheme: light dark;
  --page: #ffffff; --card: #f5f6f8; --ink: #1b1f24; --soft: #57606a; --rule: #d5d9de; --accent: #0065a8;
  --best: #b54600; --heat: #08519c; --code: #eef0f3; --row: #fff3e6;
  {_variables(SERIES)}
}}
@media screen and (prefers-color-scheme: dark) {{
  :root {{
    --page: #14171c; --card: #1e232a; --ink: #e8eaed; --soft: #a9b1bb; --rule: #3a424d; --accent: #7cc4f5;
    --best: #ff9a4d; --heat: #6cb6f0; --code: #252b33; --row: #3a2a1a;
    {_variables(_SERIES_DARK)}
  }}
}}
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }}
body {{
  margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 64rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; overflow-wrap: anywhere;
}}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }}
h2 {{ font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--rule); }}
p {{ margin: .5rem 0; max-width: 46rem; }}
.soft, figcaption, caption {{ color: var(--soft); font-size: .875rem; }}
.whole {{ white-space: nowrap; }}
.verdict {{ font-size: 1.15rem; margin: 1rem 0; }}
figure {{ margin: 1rem 0; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }}
.tiles > div {{ flex: 1 1 9.5rem; max-width: 17rem; }}
.tiles > div {{ background: var(--card); border-radius: .5rem; padding: .75rem .9rem; }}
.tiles dt {{ color: var(--soft); font-size: .8rem; }}
.tiles dd {{ margin: 0; }}
.tiles .big {{ font-size: 1.5rem; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }}
pre {{
  background: var(--code); border-radius: .5rem; padding: .7rem .9rem; margin: .25rem 0 .75rem; white-space: pre-wrap;
}}
code {{
  font: .875rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; user-select: all;
}}
.panels {{
  display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); gap: 1.25rem 1rem; margin: 1rem 0;
}}
.panels {{ align-items: end; }}
.panels figure {{ margin: 0; min-width: 0; }}
.panels h3 {{ font-size: .9rem; line-height: 1.25; margin: 0; color: var(--ink); }}
.panels figcaption {{ font-size: .8rem; line-height: 1.3; margin-bottom: .3rem; }}
.legend {{
  display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; margin: .5rem 0; list-style: none;
  font-size: .85rem;
}}
.legend svg {{ width: 2rem; height: .75rem; vertical-align: -1px; margin-right: .35rem; }}
.chart {{ display: block; width: 100%; height: auto; overflow: visible; }}
.narrow {{ display: none; }}
.tick {{ fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }}
.grid {{ stroke: var(--rule); stroke-width: 1; opacity: .6; fill: none; }}
.axis {{ stroke: var(--soft); stroke-width: 1; fill: none; }}
.rule {{ stroke: var(--best); stroke-width: 1.25; stroke-dasharray: 2 3; fill: none; }}
.level {{ stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 6 4; fill: none; }}
.gain {{ stroke: var(--best); stroke-width: 1.25; stroke-dasharray: 2 3; fill: none; }}
.line path {{
  fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-dasharray: var(--dash, none);
}}
.line path.band {{ fill: var(--c); fill-opacity: .22; stroke: none; }}
.line circle {{ fill: var(--c); stroke: transparent; stroke-width: 8; }}
.line circle:hover {{ stroke: var(--c); stroke-opacity: .35; }}
.best {{ fill: var(--best); stroke: var(--page); stroke-width: 1.5; }}
.last {{ fill: var(--page); stroke: var(--ink); stroke-width: 2; }}
.word {{
  font-size: 13px; fill: var(--ink); paint-order: stroke; stroke: var(--page); stroke-width: 4px;
  stroke-linejoin: round;
}}
.best-word, .gain-word {{ fill: var(--best); font-weight: 650; }}
.heat {{
  display: grid; grid-template-columns: minmax(6rem, 15rem) 1fr; gap: 2px .75rem; align-items: center;
  margin: 1rem 0; font-size: .85rem; line-height: 1.2;
}}
.heat .strip {{ display: block; width: 100%; height: 1.4rem; background: var(--card); }}
.heat .average {{ font-weight: 650; margin-bottom: .5rem; }}
.strip {{ overflow: visible; }}
.strip rect {{ fill: var(--heat); }}
.strip .gap {{ stroke: var(--soft); stroke-width: 1px; vector-effect: non-scaling-stroke; }}
.strip rect.peak {{ stroke: var(--best); stroke-width: 2.5px; vector-effect: non-scaling-stroke; }}
.heat .layers {{ position: relative; height: 1.1rem; grid-column: 2; color: var(--soft); font-size: .75rem; }}
.layers span {{ position: absolute; transform: translateX(-50%); white-space: nowrap; }}
.scale {{ display: flex; align-items: center; gap: .5rem; font-size: .8rem; color: var(--soft); margin: .25rem 0; }}
.scale svg {{ width: 8rem; height: .9rem; background: var(--card); }}
.scroll {{ overflow-x: auto; margin: 1rem 0; border: 1px solid var(--rule); border-radius: .5rem; }}
.scroll:focus-visible {{ outline: 2px solid var(--accent); }}
table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }}
caption {{ text-align: left; padding: .5rem .75rem; }}
th, td {{ padding: .2rem .75rem; text-align: right; white-space: nowrap; }}
thead th {{
  vertical-align: bottom; font-weight: 600; white-space: normal; overflow-wrap: normal;
  border-bottom: 1px solid var(--soft); line-height: 1.2;
}}
tbody th, tfoot th, thead th:first-child {{
  position: sticky; left: 0; background: var(--page); text-align: left; font-weight: 600;
}}
tbody tr:nth-child(even) > * {{ background: var(--card); }}
tbody tr.winner > * {{ background: var(--row); }}
tfoot > tr > * {{ border-top: 1px solid var(--soft); }}
td.top {{ font-weight: 700; color: var(--best); }}
.facts {{
  display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .25rem 1.25rem; font-size: .9rem;
  margin: .5rem 0;
}}
.facts dt {{ color: var(--soft); }}
.facts dd {{ margin: 0; }}
@media (max-width: 52rem) {{ .panels {{ grid-template-columns: repeat(3, minmax(0, 1fr)); }} }}
@media (max-width: 36rem) {{
  .wide {{ display: none; }}
  .narrow {{ display: block; }}
  .panels {{ grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem .75rem; }}
  .panels h3 {{ font-size: .8rem; }}
  .panels figcaption {{ font-size: .75rem; }}
  .panels .tick {{ font-size: 14px; }}
  .tiles .big {{ font-size: 1.25rem; }}
  .heat {{ grid-template-columns: minmax(0, 1fr); }}
  .heat .layers {{ grid-column: 1; }}
  .heat .average {{ margin-bottom: 0; }}
  .heat .task {{ margin-top: .4rem; }}
  .facts {{ grid-template-columns: minmax(0, 1fr); gap: 0; }}
  .facts dd {{ margin-bottom: .5rem; }}
}}
@media print {{
  :root {{ color-scheme: light; }}
  @page {{ margin: 14mm; }}
  body {{
    font-size: 10.5pt; padding: 0; max-width: none; print-color-adjust: exact; -webkit-print-color-adjust: exact;
  }}
  h2, h3, section > p.soft {{ break-after: avoid; }}
  figure, .tiles > div, .panels figure, .scroll, tr, .heat > * {{ break-inside: avoid; }}
  tfoot {{ display: table-row-group; }}
  .scroll {{ overflow: visible; border: 0; }}
  table {{ font-size: 7.5pt; }}
  th, td {{ padding: .5pt 4pt; }}
  .panels {{ grid-template-columns: repeat(3, 1fr); }}
}}
{_series_rules()}
"""
