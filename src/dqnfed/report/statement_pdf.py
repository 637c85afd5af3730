"""A site's statement as a PDF of A4 pages: text stays text, fonts are inside the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dqnfed.report.statement import Bar, Bars, Block, Facts, Grid, Signatures, Statement, Text
from dqnfed.report.statement_html import DIGITS_OF_A_SUM, LINES, is_sums

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.ft2font import FT2Font

WIDTH, HEIGHT = 595.0, 842.0  # A4 in points
LEFT, TOP, BOTTOM = 56.0, 60.0, 66.0
INNER = WIDTH - 2 * LEFT
INK, MUTED, FAINT, MAIN, OTHER = "#1b2125", "#57616a", "#e3e7e7", "#0b5db4", "#8e99a1"
GAP = 8.0
Draw = Callable[["Figure"], None]


class Face(NamedTuple):
    """How a text is set."""

    size: float
    colour: str = INK
    is_bold: bool = False
    is_mono: bool = False

    @property
    def leading(self) -> float:
        return 1.42 * self.size


TITLE, HEAD, LEAD, BODY = Face(22, is_bold=True), Face(11.5, is_bold=True), Face(11.2), Face(9)
BOLD, SMALL, SUM = Face(9, is_bold=True), Face(7.8, MUTED), Face(6.6, is_mono=True)
QUIET, CELL, CELL_HEAD = Face(9, MUTED), Face(8.2), Face(8.2, is_bold=True)


@cache
def font(is_bold: bool, is_mono: bool) -> FT2Font:
    """Return the font that comes with matplotlib, for measuring."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    family = "DejaVu Sans Mono" if is_mono else "DejaVu Sans"
    return FT2Font(findfont(FontProperties(family=family, weight="bold" if is_bold else "normal")))


@cache
def advance(letter: str, is_bold: bool, is_mono: bool) -> float:
    """Return how wide a letter is at size 1."""
    ruler = font(is_bold, is_mono)
    ruler.set_size(100, 72)
    glyph = ruler.load_char(ord(letter))
    return float(glyph.linearHoriAdvance) / 65536 / 100


def width_of(text: str, face: Face) -> float:
    """Return how wide a line is, in points; kerning, which makes it a little narrower, aside."""
    return face.size * sum(advance(letter, face.is_bold, face.is_mono) for letter in text)


def known_letters(text: str, face: Face) -> str:
    """Return the text with a mark for every letter that the font does not have."""
    letters = font(face.is_bold, face.is_mono).get_charmap()
    return "".join(letter if ord(letter) in letters else "\N{REPLACEMENT CHARACTER}" for letter in text)


def lines_of(text: str, face: Face, width: float) -> list[str]:
    """Return the text in lines that are no wider than this; a word that is wider is broken."""
    found: list[str] = []
    for paragraph in known_letters_by_line(text, face):
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if width_of(longer, face) <= width:
                line = longer
                continue
            if line:
                found.append(line)
            line = word
            while width_of(line, face) > width and len(line) > 1:
                n = next(n for n in range(len(line) - 1, 0, -1) if n == 1 or width_of(line[:n], face) <= width)
                found.append(line[:n])
                line = line[n:]
        found.append(line)
    return found


def known_letters_by_line(text: str, face: Face) -> list[str]:
    return [known_letters(line, face) for line in text.split("\n")]


class Sheets:
    """Pages that are filled from above; what is drawn on each is kept until all are known."""

    def __init__(self) -> None:
        self.pages: list[list[Draw]] = [[]]
        self.y = TOP  # of the next line's upper edge, from above

    def room(self, height: float) -> None:
        """Begin a new page where so much does not fit any more."""
        if self.y + height > HEIGHT - BOTTOM and self.y > TOP:
            self.pages.append([])
            self.y = TOP

    def line(self, x: float, y: float, text: str, face: Face, *, right: bool = False) -> None:
        """Draw one line of text whose upper edge is at y."""
        self.pages[-1].append(lambda figure: _text(figure, x, y + 1.05 * face.size, text, face, right=right))

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.pages[-1].append(lambda figure: _box(figure, x, y, width, height, colour))

    def paragraph(self, text: str, face: Face, *, x: float = LEFT, width: float = INNER) -> None:
        """Draw a paragraph below what is there."""
        for line in lines_of(text, face, width):
            self.room(face.leading)
            self.line(x, self.y, line, face)
            self.y += face.leading


def write_pdf(statement: Statement, path: Path) -> None:
    """Write the statement's pages."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    sheets = Sheets()
    _title(sheets, statement)
    for section in statement.sections:
        sheets.room(HEAD.leading + 3 + height_of_start(section.blocks[0]))
        sheets.paragraph(section.title, HEAD)
        sheets.y += 3
        for block in section.blocks:
            _block(sheets, block)
        sheets.y += 10
    title = f"Site statement: {statement.site}"
    facts = {"Title": title, "Subject": statement.experiment, "Creator": "dqnfed"}
    with rc_context({"pdf.fonttype": 42}), PdfPages(path, metadata=facts) as file:
        for number, draws in enumerate(sheets.pages, start=1):
            figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
            for draw in draws:
                draw(figure)
            _foot(figure, f"{title} · {statement.experiment} · {statement.made}", number, len(sheets.pages))
            file.savefig(figure)


def height_of_start(block: Block) -> float:
    """Return how much of a section's first block belongs on the page of its title."""
    match block:
        case Bars():
            return SMALL.leading + 24.0 * len(block.bars)
        case Signatures():
            return 50.0 + 34.0 * len(LINES)
        case _:
            return 46.0


def _title(sheets: Sheets, statement: Statement) -> None:
    sheets.paragraph("Site statement", QUIET)
    sheets.y += 2
    sheets.paragraph(statement.site, TITLE)
    sheets.y += 2
    sheets.paragraph(f"{statement.experiment} · {statement.made}", QUIET)
    sheets.y += 7
    sheets.box(LEFT, sheets.y, INNER, 1.4, INK)
    sheets.y += 20


def _block(sheets: Sheets, block: Block) -> None:
    match block:
        case Text():
            _text_block(sheets, block)
        case Facts():
            _facts(sheets, block)
        case Grid():
            _grid(sheets, block)
        case Bars():
            sheets.room(SMALL.leading + 24 * len(block.bars))
            sheets.paragraph(block.caption, SMALL)
            sheets.y += 3
            for bar in block.bars:
                _bar(sheets, bar)
            sheets.y += 6
        case Signatures():
            _signatures(sheets, block)


def _text_block(sheets: Sheets, block: Text) -> None:
    face = {"lead": LEAD, "note": SMALL}.get(block.style, BODY)
    if block.text:
        sheets.paragraph(block.text, face)
    for item in block.items:
        sheets.room(BODY.leading)
        sheets.line(LEFT + 2, sheets.y, "\N{BULLET}", BODY)
        sheets.paragraph(item, BODY, x=LEFT + 13, width=INNER - 13)
    sheets.y += 5


def _facts(sheets: Sheets, block: Facts) -> None:
    first = 128.0
    for name, value in block.pairs:
        sheets.room(BODY.leading)
        sheets.line(LEFT, sheets.y, name, QUIET)
        sheets.paragraph(value, BODY, x=LEFT + first, width=INNER - first)
        sheets.y += 1
    sheets.y += 6


def _grid(sheets: Sheets, block: Grid) -> None:
    """Draw a table whose columns get room by their widest text; a row stays on one page, the head comes again."""
    face = SUM if is_sums(block) else CELL
    rows = [tuple(in_halves(cell) for cell in row) for row in block.rows] if is_sums(block) else block.rows
    widths = column_widths([block.heads, *rows], face)
    if block.caption:
        sheets.room(3 * SMALL.leading)
        sheets.paragraph(block.caption, SMALL)
        sheets.y += 2

    def row(texts: Sequence[str], face: Face, *, first: Face) -> float:
        columns = [
            lines_of(text, first if i == 0 else face, w - GAP)
            for i, (text, w) in enumerate(zip(texts, widths, strict=True))
        ]
        height = max(len(lines) * (first if i == 0 else face).leading for i, lines in enumerate(columns)) + 5
        x = LEFT
        for i, (lines, width) in enumerate(zip(columns, widths, strict=True)):
            used, is_right = (first if i == 0 else face), i > 0 and not is_sums(block)
            for n, line in enumerate(lines):
                is_second = n > 0 and "\n" in texts[i] and not is_sums(block)
                below = used._replace(colour=MUTED, size=used.size - 0.8) if is_second else used
                at = x + width - (GAP if i < len(widths) - 1 else 0) if is_right else x
                sheets.line(at, sheets.y + 3 + n * used.leading, line, below, right=is_right)
            x += width
        sheets.y += height
        return height

    def head() -> None:
        row(block.heads, CELL_HEAD, first=CELL_HEAD)
        sheets.box(LEFT, sheets.y, INNER, 1.0, INK)
        sheets.y += 2

    sheets.room(4 * CELL.leading + 12)
    head()
    for texts in rows:
        n_lines = max(
            len(lines_of(text, CELL if i == 0 else face, w - GAP))
            for i, (text, w) in enumerate(zip(texts, widths, strict=True))
        )
        before = len(sheets.pages)
        sheets.room(n_lines * CELL.leading + 6)
        if len(sheets.pages) > before:
            head()
        row(texts, face, first=CELL)
        sheets.box(LEFT, sheets.y, INNER, 0.5, FAINT)
    sheets.y += 10


def in_halves(text: str) -> str:
    """Return a checksum in two lines."""
    return f"{text[:32]}\n{text[32:]}" if len(text) == DIGITS_OF_A_SUM else text


def column_widths(cells: Sequence[Sequence[str]], face: Face) -> list[float]:
    """Return the columns' widths, which fill a line: room for the longest word of each, then for longer texts."""
    least, most = [], []
    for i in range(len(cells[0])):
        texts = [(row[i], CELL_HEAD if r == 0 else CELL if i == 0 else face) for r, row in enumerate(cells)]
        lines = [(known_letters(part, f), f) for text, f in texts for part in text.split("\n")]
        least.append(GAP + 1 + max(width_of(word, f) for line, f in lines for word in line.split(" ")))
        most.append(GAP + 1 + max(width_of(line, f) for line, f in lines))
    if sum(least) > INNER:
        return [INNER * width / sum(least) for width in least]
    room = INNER - sum(least)
    wanted = sum(most) - sum(least)
    share = min(1.0, room / wanted) if wanted else 0.0
    widths = [low + share * (high - low) for low, high in zip(least, most, strict=True)]
    rest = (INNER - sum(widths)) / max(1, len(widths) - 1)
    return [widths[0], *(width + rest for width in widths[1:])]


def _bar(sheets: Sheets, bar: Bar) -> None:
    face = BOLD if bar.is_main else BODY
    start, width, height = LEFT + 168, INNER - 168 - 62, 13.0
    lines = lines_of(bar.label, face, 158)
    sheets.room(max(20.0, len(lines) * face.leading))
    for n, line in enumerate(lines):
        sheets.line(LEFT, sheets.y + 1 + n * face.leading, line, face)
    sheets.box(start, sheets.y, width, height, FAINT)
    sheets.box(start, sheets.y, width * bar.place, height, MAIN if bar.is_main else OTHER)
    if math.isfinite(bar.low):
        sheets.box(
            start + width * bar.low, sheets.y + height / 2 - 1.5, max(1.0, width * (bar.high - bar.low)), 3.0, "#ffffff"
        )
        sheets.box(
            start + width * bar.low, sheets.y + height / 2 - 0.7, max(1.0, width * (bar.high - bar.low)), 1.4, INK
        )
    sheets.line(LEFT + INNER, sheets.y + 1, bar.text, face, right=True)
    sheets.y += max(19.0, len(lines) * face.leading + 3)


def _signatures(sheets: Sheets, block: Signatures) -> None:
    width = (INNER - 36) / len(block.roles)
    for i, role in enumerate(block.roles):
        x = LEFT + i * (width + 36)
        sheets.line(x, sheets.y + 2, role, BOLD)
        for n, line in enumerate(LINES):
            y = sheets.y + 44 + 34 * n
            sheets.box(x, y, width, 0.6, MUTED)
            sheets.line(x, y + 2, line, SMALL)
    sheets.y += 44 + 34 * len(LINES)


def _foot(figure: Figure, text: str, number: int, n_pages: int) -> None:
    _box(figure, LEFT, HEIGHT - 48, INNER, 0.5, FAINT)
    face = SMALL._replace(size=7)
    [shown, *_] = lines_of(text, face, INNER - 60)
    _text(figure, LEFT, HEIGHT - 36, shown, face, right=False)
    _text(figure, LEFT + INNER, HEIGHT - 36, f"page {number} of {n_pages}", face, right=True)


def _text(figure: Figure, x: float, y: float, text: str, face: Face, *, right: bool) -> None:
    figure.text(
        x / WIDTH,
        1 - y / HEIGHT,
        text,
        fontsize=face.size,
        color=face.colour,
        fontweight="bold" if face.is_bold else "normal",
        fontfamily="DejaVu Sans Mono" if face.is_mono else "DejaVu Sans",
        ha="right" if right else "left",
        va="baseline",
        parse_math=False,
    )


def _box(figure: Figure, x: float, y: float, width: float, height: float, colour: str) -> None:
    from matplotlib.patches import Rectangle

    place = (x / WIDTH, 1 - (y + height) / HEIGHT)
    figure.add_artist(
        Rectangle(place, width / WIDTH, height / HEIGHT, color=colour, linewidth=0, transform=figure.transFigure)
    )
