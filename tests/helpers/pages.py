"""The code blocks of a Markdown page, with the lines they stand on."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^\s*```\s*(?P<language>[\w-]*)(?:\s+title=\"(?P<title>[^\"]*)\")?")
COMMENT = re.compile(r"^\s*<!--\s*(?P<text>.*?)\s*-->\s*$")
NOT_EXECUTED = re.compile(r"not executed:\s*(?P<reason>.+)")


class Block(NamedTuple):
    page: Path
    line: int  # of the opening fence, counted from 1; the code starts on the next one
    language: str
    code: str
    comment: str  # the HTML comment right above, or ""
    title: str = ""  # the file that the code is for; such code is not executed where it stands

    @property
    def reason_not_executed(self) -> str | None:
        match = NOT_EXECUTED.fullmatch(self.comment)
        return match["reason"] if match else None

    @property
    def is_executed_python(self) -> bool:
        return self.language == "python" and self.reason_not_executed is None and not self.title

    @property
    def is_executed_command(self) -> bool:
        return self.language == "bash" and self.comment == "run"


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of the page in order; a fence that is never closed is an error."""
    found: list[Block] = []
    comment, opening, language, title, code = "", 0, "", "", list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if opening and fence:
            found.append(Block(page, opening, language, textwrap.dedent("\n".join(code)) + "\n", comment, title))
            comment, opening, code = "", 0, []
        elif opening:
            code.append(line)
        elif fence:
            opening, language, title = number, fence["language"], fence["title"] or ""
        elif line.strip():
            match = COMMENT.match(line)
            comment = match["text"] if match else ""
    if opening:
        raise ValueError(f"{page}:{opening}: this code block is never closed; end it with a line of three backquotes")
    return found
