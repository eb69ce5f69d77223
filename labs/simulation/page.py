"""Renders a comparison as one HTML page that needs nothing else: no script, no font, no request; light and dark."""

from collections.abc import Sequence

from labs.simulation.metrics import class_rows, escaped, groups, tenant_rows, with_spread
from labs.simulation.search.sweep import Sweep, sweep_rows
from labs.simulation.study import Results
from labs.simulation.summary import spread

_STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfb; --ink: #1b1b19; --soft: #66665f; --rule: #e4e3de; }
@media (prefers-color-scheme: dark) { :root { --paper: #191918; --ink: #ececea; --soft: #a5a49d; --rule: #33332f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 32px 24px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
p { margin: 0; color: var(--soft); }
.facts { margin-bottom: 20px; }
.remarks { font: 13px/1.5 ui-monospace, monospace; color: var(--soft); white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; margin: 44px 0 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; font-size: 16px; padding-bottom: 8px; }
th, td { text-align: right; padding: 4px 12px; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; max-width: 14em; min-width: 5em; overflow-wrap: break-word; vertical-align: bottom; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; min-width: 13em; max-width: 26em;
  white-space: normal; overflow-wrap: break-word; }
tr.section th { padding-top: 16px; color: var(--soft); font-weight: 500; }
.wide { overflow-x: auto; }
"""


def page(results: Results, title: str, facts: str, remarks: Sequence[str] = ()) -> str:
    """Renders the page. `title`, `facts` and `remarks` are plain text, as are all names in the results; all is
    escaped.
    """
    return document(title, facts, remarks, f"{_table(results)}{_tenants(results)}")


def sweep_page(sweep: Sweep, title: str, facts: str, remarks: Sequence[str] = ()) -> str:
    """Renders the page of a sweep, as `page` does."""
    head, *rows = sweep_rows(sweep)
    table = wide_table("By load", head, [table_row(row) for row in rows])
    return document(title, facts, remarks, table)


def document(title: str, facts: str, remarks: Sequence[str], tables: str) -> str:
    """Renders a page around `tables`, which are HTML already; the rest is plain text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escaped(title)}</h1>\n<p class="facts">{escaped(facts)}</p>\n{_remarks(remarks)}'
        f"<main>\n{tables}</main>\n</body>\n</html>\n"
    )


def _remarks(remarks: Sequence[str]) -> str:
    lines = "\n".join(escaped(line) for line in remarks)
    return f'<pre class="remarks">{lines}</pre>\n' if remarks else ""


def _table(results: Results) -> str:
    width = len(results.names) + 1
    rows = []
    for group, metrics in groups(results.refusal_reasons, results.currencies).items():
        rows.append(f'<tr class="section"><th colspan="{width}">{escaped(group)}</th></tr>')
        for metric in metrics:
            cells = [with_spread(metric, spread(runs, metric.get)) for runs in results.runs]
            rows.append(table_row([metric.label, *cells]))
    seeds = results.study.seeds
    what = f"All figures, medians over {seeds} seeds (lowest to highest)" if seeds > 1 else "All figures"
    return wide_table(what, ["", *results.names], rows)


def _tenants(results: Results) -> str:
    tables = []
    for name, runs in zip(results.names, results.runs, strict=True):
        for what, (head, *rows) in (
            ("Classes", class_rows(runs[0].classes)),
            ("Tenants", tenant_rows(runs[0].tenants)),
        ):
            tables.append(
                wide_table(f"{what} under {name}{_of_first(results)}", head, [table_row(row) for row in rows])
            )
    return "".join(tables)


def _of_first(results: Results) -> str:
    return ", seed 1" if results.study.seeds > 1 else ""


def table_row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in cells) + "</tr>\n"


def wide_table(caption: str, headings: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{escaped(heading)}</th>" for heading in headings)
    top = f"<caption>{escaped(caption)}</caption><tr>{head}</tr>\n"
    return f'<div class="wide"><table>{top}{"".join(rows)}</table></div>\n'
