"""Write the pages that describe every method of REGISTRY from the methods themselves: `python -m tools.reference`."""

import dataclasses
import inspect
import re
from pathlib import Path

from dqnfed.algorithms import REGISTRY
from dqnfed.core.algorithm import Algorithm, AnyAlgorithm, hyperparameters

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "algorithms.md"
README = ROOT / "README.md"
START, END = "<!-- methods -->", "<!-- end of methods -->"

FIELD = re.compile(r"^    (\w+): [^=\n]+ = .*?  # (.+)$", re.MULTILINE)
LABEL = re.compile(r"^(Objective|Client|Server|State|Payload|Evaluation|Differences|Reference|Curvature): ")
CODE_OR_MATH = re.compile(r"(`[^`]+`|\$[^$]+\$)")

INTRODUCTION = """\
# Algorithms

Every method that this package registers, from its own documentation; `python -m tools.reference` writes this page.
`dqnfed list algorithms` prints the same list. A method takes its settings as keyword arguments in Python
(`DQNFed(rates="identity")`) and in the `algorithm` block of a configuration (`--set algorithm.rates=identity`).
"""
SHARED = "Settings of the local work, which every method has; one without local training ignores them:"


def own_methods() -> dict[str, type[AnyAlgorithm]]:
    """Return the registered methods of this package, without those of other installed ones."""
    return {name: method for name, method in REGISTRY.items() if method.__module__.startswith("dqnfed.")}


def documentation(method: type[AnyAlgorithm]) -> list[str]:
    """Return the paragraphs of the method's docstring as Markdown, one line each."""
    text = re.sub(r":math:`([^`]+)`", r"$\1$", inspect.getdoc(method) or "")
    return [markdown(" ".join(paragraph.split())) for paragraph in re.split(r"\n\s*\n", text)]


def markdown(paragraph: str) -> str:
    """Return the paragraph with its label in bold and everything that Markdown would misread escaped."""
    pieces = CODE_OR_MATH.split(paragraph)
    pieces[::2] = [re.sub(r"([*_~<|])", r"\\\1", piece) for piece in pieces[::2]]
    return LABEL.sub(r"**\1:** ", "".join(pieces))


def comments(kind: type) -> dict[str, str]:
    """Return the comment beside each field, in the class or in those it extends."""
    found: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        if dataclasses.is_dataclass(parent):
            found.update(FIELD.findall(inspect.getsource(parent)))
    return found


def settings_table(kind: type, names: list[str]) -> str:
    """Return the table of the named fields: default and meaning."""
    said = comments(kind)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    rows = [f"| `{name}` | `{defaults[name]!r}` | {markdown(said.get(name, ''))} |" for name in names]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def methods_table(prefix: str) -> str:
    """Return the table of all methods, each linked to its section."""
    rows = []
    for name, method in own_methods().items():
        suits = "any model" if "network" in method.suits else "convex models"
        rows.append(f"| [`{name}`]({prefix}#{name}) | {documentation(method)[0]} | {suits} |")
    return "\n".join(["| name | method | suits |", "|---|---|---|", *rows])


def section(name: str, method: type[AnyAlgorithm]) -> str:
    """Return what there is to say about one method."""
    parts = [f"## {name}", f"`{method.__module__}.{method.__name__}`", *documentation(method)]
    if names := hyperparameters(method):  # the method's own before those it inherits
        parts.append(settings_table(method, sorted(names, key=lambda name: name not in method.__annotations__)))
    parts += [f"Exempt from the contract test `{test}`: {markdown(why)}" for test, why in method.exemptions.items()]
    return "\n\n".join(parts)


def page() -> str:
    """Return the reference page."""
    shared = [field.name for field in dataclasses.fields(Algorithm)]
    parts = [INTRODUCTION + "\n" + methods_table(""), SHARED, settings_table(Algorithm, shared)]
    return "\n\n".join([*parts, *(section(name, method) for name, method in own_methods().items())]) + "\n"


def readme(text: str) -> str:
    """Return the README's text with its table of methods as it is now."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"README.md needs the lines {START} and {END} around its table of methods.")
    return f"{before}{START}\n{methods_table('docs/reference/algorithms.md')}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
