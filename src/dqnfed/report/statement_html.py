"""A site's statement as one self-contained HTML page: no script, no network, opens from disk and prints well."""

from __future__ import annotations

import math
from html import escape

from dqnfed.report.statement import Bar, Bars, Block, Facts, Grid, Section, Signatures, Statement, Text

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
LINES = ("Name", "Role", "Place and date", "Signature")
DIGITS_OF_A_SUM = 64


def statement_page(statement: Statement, style: str) -> str:
    """Return the whole page."""
    title = f"Site statement: {statement.site}"
    sections = "\n".join(_section(section) for section in statement.sections)
    return f"""<!doctype html>
<html lang="en" data-ready="true">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main class="sheet">
<header>
<p class="kind">Site statement</p>
<h1>{escape(statement.site)}</h1>
<p class="made">{escape(statement.experiment)} · {escape(statement.made)}</p>
</header>
{sections}
</main>
</body>
</html>
"""


def _section(section: Section) -> str:
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{''.join(map(_block, section.blocks))}</section>"


def _block(block: Block) -> str:
    match block:
        case Text():
            return _text(block)
        case Facts():
            pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in block.pairs)
            return f"<dl>{pairs}</dl>\n"
        case Grid():
            return _grid(block)
        case Bars():
            bars = "".join(map(_bar, block.bars))
            return f'<p class="caption">{escape(block.caption)}</p><div class="bars">{bars}</div>\n'
        case Signatures():
            lines = "".join(f'<p class="line">{line}</p>' for line in LINES)
            places = "".join(f"<div><h3>{escape(role)}</h3>{lines}</div>" for role in block.roles)
            return f'<div class="sign">{places}</div>\n'


def _text(block: Text) -> str:
    style = f' class="{block.style}"' if block.style else ""
    items = "".join(f"<li>{escape(item)}</li>" for item in block.items)
    return (f"<p{style}>{escape(block.text)}</p>" if block.text else "") + (f"<ul>{items}</ul>" if items else "") + "\n"


def _grid(block: Grid) -> str:
    style = ' class="sums"' if is_sums(block) else ""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in block.heads)
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(_cell(title, text) for title, text in zip(block.heads[1:], cells, strict=True))
        + "</tr>"
        for first, *cells in block.rows
    )
    caption = f'<p class="caption">{escape(block.caption)}</p>' if block.caption else ""
    table = f"<table{style}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'{caption}<div class="scroll">{table}</div>\n'


def _cell(title: str, text: str) -> str:
    first, _, below = text.partition("\n")
    small = f"<small>{escape(below)}</small>" if below else ""
    return f'<td data-label="{escape(title, quote=True)}">{escape(first)}{small}</td>'


def is_sums(block: Grid) -> bool:
    """Return whether a table holds checksums, which are long and set small."""
    return any(len(cell) == DIGITS_OF_A_SUM for row in block.rows for cell in row[1:])


def _bar(bar: Bar) -> str:
    reach = ""
    if math.isfinite(bar.low):
        reach = f'<span class="reach" style="left:{100 * bar.low:.2f}%;width:{100 * (bar.high - bar.low):.2f}%"></span>'
    return (
        f'<div class="bar{" main" if bar.is_main else ""}"><span class="label">{escape(bar.label)}</span>'
        f'<span class="track" role="img" aria-label="{escape(f"{bar.label}: {bar.text}", quote=True)}">'
        f'<span class="fill" style="width:{100 * bar.place:.2f}%"></span>{reach}</span>'
        f'<span class="value">{escape(bar.text)}</span></div>'
    )
