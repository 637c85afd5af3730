"""The reference pages of all methods, made from their classes: docstring, settings, and traffic that was measured.

`make reference` measures what every method's clients send and keep, and writes all pages and their index; nothing of
them is edited by hand.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dqnfed.algorithms import OPTIONAL, REFERENCES, REGISTRY
from dqnfed.algorithms.fedbn import FedBN
from dqnfed.algorithms.fedrep import FedRep
from dqnfed.algorithms.jacobian_descent import JD_METHODS
from dqnfed.core.algorithm import LOCAL_WORK, Cohort, Status, hyperparameters
from dqnfed.core.federation import Federation
from dqnfed.core.local_work import AnyMethod, LocalWork
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies
from dqnfed.core.runners import looped
from dqnfed.core.seeds import seed_for
from dqnfed.core.tensors import row, stack, tensors
from dqnfed.experiments.prefer import prefer_sentence
from dqnfed.sim.tasks import TaskBuilder

FOLDER = Path("docs/reference/methods")
TRAFFIC = Path(__file__).with_name("traffic.json")  # measuring takes a minute, listing must not
LABELS = ("Objective", "Client", "Server", "State", "Payload", "Evaluation", "Differences", "Reference")
HEADINGS = {"Client": "What the client does and sends", "Server": "What the server does", "State": "What is kept"}
NEEDS = {
    "sum": "weighted sums of the replies and one number a client",
    "gram": "the products of every two replies, besides weighted sums",
    "rows": "every reply itself",
}
NOTICE = "<!-- Made by `make reference` from the class; change its docstring instead. -->"
SIZES = (6, 10, 14, 20)  # numbers of parameters that payloads are measured at
N_CLIENTS = 2


class Traffic(NamedTuple):
    """What one client sends in a round and keeps between rounds, as formulas in the number n of parameters."""

    up: str
    kept: str


def described_algorithms() -> list[dict[str, Any]]:
    """Return what `dqnfed list algorithms` shows of every method."""
    return [_described(name, kind) for name, kind in {**REGISTRY, **REFERENCES}.items()]


def _described(name: str, kind: type[AnyMethod]) -> dict[str, Any]:
    traffic = traffic_of(name, kind)
    return {
        "name": name,
        "title": title(kind),
        "payload": traffic.up,
        "memory": traffic.kept,
        "needs": "; ".join(kind.info.needs),
        "personal": kind.info.personal,
        "problem_kinds": sorted(kind.info.problem_kinds),
        "local_work": [setting for setting in LOCAL_WORK if setting in kind.info.local_work],
        "hyperparameters": {
            key: _default(field) for key, field in _fields(kind).items() if key in hyperparameters(kind)
        },
    }


def title(kind: type[AnyMethod]) -> str:
    """Return the first line of the class's docstring, without its full stop."""
    return (inspect.getdoc(kind) or kind.__name__).splitlines()[0].rstrip(".")


def sections(kind: type[AnyMethod]) -> dict[str, str]:
    """Return the labelled parts of the class's docstring; what stands outside of them is under ""."""
    _, _, body = (inspect.getdoc(kind) or "").partition("\n")
    pieces = re.split(rf"(?:^|(?<=\n)|(?<=\. ))({'|'.join(LABELS)}): ", body)
    found = {"": pieces[0].strip()}
    for label, text in zip(pieces[1::2], pieces[2::2], strict=True):
        found[label] = text.strip()
    return found


def field_comments(kind: type[Any]) -> dict[str, str]:
    """Return the comment behind every hyper-parameter: its meaning and range."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, LocalWork):
            found.update(re.findall(r"^    (\w+): [^#\n]+  # (.+)$", inspect.getsource(base), flags=re.MULTILINE))
    return {name: found.get(name, "") for name in _fields(kind)}


def traffic_of(name: str, kind: type[AnyMethod]) -> Traffic:
    """Return what one client sends and keeps, as it is on file; a method of a third party is measured now."""
    filed = _filed_traffic()
    return filed[name] if name in filed else measured_traffic(kind)


@cache
def _filed_traffic() -> dict[str, Traffic]:
    return {name: Traffic(**row) for name, row in json.loads(TRAFFIC.read_text()).items()} if TRAFFIC.is_file() else {}


def write_traffic() -> None:
    """Measure every method that has a page, and write the file."""
    found = {name: measured_traffic(kind)._asdict() for name, kind in documented().items()}
    TRAFFIC.write_text(json.dumps(found, indent=2) + "\n")
    _filed_traffic.cache_clear()


def documented() -> dict[str, type[AnyMethod]]:
    """Return the methods that have a page: this package's, optional ones too, whether they are installed or not."""
    known = {**REGISTRY, **JD_METHODS, **REFERENCES}
    return {name: kind for name, kind in known.items() if kind.__module__.startswith("dqnfed.")}


PARTS: dict[type[AnyMethod], Traffic] = {
    FedRep: Traffic("n - h", "h"),  # h numbers of the last layer
    FedBN: Traffic("n - b", "b"),  # b numbers of BatchNorm layers
}


@cache
def measured_traffic(kind: type[AnyMethod]) -> Traffic:
    """Return what a client sends in the second round and keeps, measured with all of a few clients taking part."""
    if kind in PARTS:
        return PARTS[kind]  # of layers that the problem below does not have
    counts = [_floats(kind, n) for n in SIZES]
    return Traffic(formula([up for up, _ in counts]), formula([kept for _, kept in counts]))


def formula(values: Sequence[Fraction]) -> str:
    """Return the values at n = 6, 10, 14, 20 as a polynomial in n of degree two at most, else as a share of n."""
    x, y = [Fraction(n) for n in SIZES], list(values)
    slope = (y[1] - y[0]) / (x[1] - x[0])
    square = ((y[2] - y[0]) / (x[2] - x[0]) - slope) / (x[2] - x[1])
    linear = slope - square * (x[0] + x[1])
    constant = y[0] - linear * x[0] - square * x[0] ** 2
    if square * x[3] ** 2 + linear * x[3] + constant != y[3]:
        return f"about {float(y[3] / x[3]):.2g} n"
    terms = [_term(square, "n^2"), _term(linear, "n"), _term(constant, "")]
    return " + ".join(term for term in terms if term).replace("+ -", "- ") or "0"


def _term(factor: Fraction, power: str) -> str:
    if factor == 0:
        return ""
    if not power:
        return str(factor)
    number = {1: "", -1: "-"}.get(factor.numerator, str(factor.numerator))
    return number + power + ("" if factor.denominator == 1 else f"/{factor.denominator}")


def _floats(kind: type[AnyMethod], n: int) -> tuple[Fraction, Fraction]:
    """Return how many floats one client sends in the second round, and keeps after it, for a model of n parameters."""
    problem, federation = _small_problem(n)
    algorithm = kind().prepare(problem, N_CLIENTS, N_CLIENTS)
    builder = TaskBuilder(federation, problem, algorithm, 0)
    clients = torch.arange(N_CLIENTS)
    server = algorithm.init_server(problem, N_CLIENTS)
    bits, first = 0, builder.stacked(clients, 0)
    memory = stack([algorithm.init_memory(problem, row(first, k)) for k in range(N_CLIENTS)])
    for round in range(2):
        tasks = builder.stacked(clients, round)
        cohort = Cohort(clients, federation.n_examples, N_CLIENTS, round)
        bits, status = 0, Status.AGAIN
        while status is Status.AGAIN:
            updates, memory = looped()(algorithm, problem, tasks, algorithm.send(server), memory)
            bits += algorithm.uplink_bits(row(updates, 0))
            step = algorithm.server_step(server, Replies(updates), cohort)
            server, status = step.server, step.status
    return Fraction(bits, 64), Fraction(sum(t.numel() for t in tensors(memory)), N_CLIENTS)


def _small_problem(n: int) -> tuple[Problem, Federation]:
    """Return a strongly convex softmax regression of two classes with n parameters, float64."""
    generator = seed_for(0, purpose="method docs")
    clients = []
    for k in range(N_CLIENTS):
        labels = torch.arange(24) % 2
        inputs = torch.randn(24, n // 2, generator=generator, dtype=torch.float64)
        clients.append((inputs + (1 + k) * 0.3 * labels[:, None], labels))
    model = nn.Linear(n // 2, 2, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return Problem.from_module(model, ridge=0.1), Federation.from_clients(clients, seed=0)


def pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    methods = documented()
    return {
        "index.md": index_page(methods),
        **{f"{name}.md": method_page(name, kind) for name, kind in methods.items()},
    }


def method_page(name: str, kind: type[AnyMethod]) -> str:
    """Return the page of one method."""
    found = sections(kind)
    extra = (
        f"\nNeeds the extra `{OPTIONAL[name]}`: `pip install 'dqnfed[{OPTIONAL[name]}]'`.\n" if name in OPTIONAL else ""
    )
    blocks = [NOTICE + "\n", f"# {name}\n\n{_markdown(title(kind))}.\n{extra}"]
    if found[""]:
        blocks.append(_markdown(found[""]) + "\n")
    if prefer := prefer_sentence(name):
        blocks.append(prefer)
    for label in LABELS[:-1]:
        if label in found:
            blocks.append(f"## {HEADINGS.get(label, label)}\n\n{_markdown(found[label])}\n")
        if label == "Server":
            blocks.append(_needs_sentence(kind))
        if label == "Payload":
            blocks.append(_measured_sentence(name, kind))
    own = hyperparameters(kind)
    blocks.append("## Hyper-parameters\n\n" + (_field_table(kind, own) if own else "None of its own.\n"))
    blocks.append(_local_work_sentence(kind))
    if "Reference" in found:
        blocks.append(f"## Reference\n\n{_markdown(found['Reference'])}\n")
    return "\n".join(blocks)


def _needs_sentence(kind: type[AnyMethod]) -> str:
    """Return what the server asks of the replies, with the defaults and in other modes."""
    first, *others = kind.info.needs
    also = "".join(f"; {need}" for need in others)
    return f"Of the replies it needs `{first}`: {NEEDS[first]}{also}.\n"


def _local_work_sentence(kind: type[AnyMethod]) -> str:
    """Return which of the shared settings have an effect."""
    used = [f"`{name}`" for name in LOCAL_WORK if name in kind.info.local_work]
    unused = [f"`{name}`" for name in LOCAL_WORK if name not in kind.info.local_work]
    link = "[shared settings](index.md#local-work)"
    if not unused:
        return f"All {link} of the local work have an effect.\n"
    if not used:
        return f"None of the {link} of the local work has an effect.\n"
    if len(unused) < len(used):
        return f"All {link} of the local work but {', '.join(unused)} have an effect.\n"
    has = "has" if len(used) == 1 else "have"
    return f"Of the {link} of the local work, {', '.join(used)} {has} an effect.\n"


def _measured_sentence(name: str, kind: type[AnyMethod]) -> str:
    traffic = traffic_of(name, kind)
    keeps = "keeps nothing" if traffic.kept == "0" else f"keeps {traffic.kept}"
    return (
        f"Measured with the defaults and all clients in every round: a client sends {traffic.up} floats a round and "
        f"{keeps} between rounds, n the number of parameters.\n"
    )


def index_page(methods: dict[str, type[AnyMethod]]) -> str:
    """Return the table of all methods and the fields that they share."""
    lines = [
        NOTICE + "\n",
        "# Methods\n",
        "What a client sends in a round is counted in floats, n the number of parameters; it is measured with each",
        "method's defaults and all clients in every round. What the server needs of the replies: weighted sums (sum),",
        "the products of every two (gram) or each of them (rows). `dqnfed list algorithms --json` prints the same.\n",
        "| method | | sends | keeps | needs | evaluated | for |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kind in methods.items():
        traffic, info = traffic_of(name, kind), kind.info
        kept = "" if traffic.kept == "0" else traffic.kept
        model, kinds = "personal" if info.personal else "global", ", ".join(sorted(info.problem_kinds))
        row = [f"[{name}]({name}.md)", title(kind), traffic.up, kept, info.needs[0], model, kinds]
        lines.append("| " + " | ".join(_cell(text) for text in row) + " |")
    lines += [
        "\n## Local work\n",
        "Settings that every method accepts; its page says which of them have an effect.\n",
        _field_table(LocalWork, LOCAL_WORK),
    ]
    return "\n".join(lines)


def _field_table(kind: type[Any], names: Sequence[str]) -> str:
    comments, known = field_comments(kind), _fields(kind)
    rows = [f"| `{name}` | `{_default(known[name])!r}` | {_cell(comments[name])} |" for name in names]
    return "\n".join(["| name | default | meaning, range |", "|---|---|---|", *rows, ""])


def _fields(kind: type[Any]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(kind)}


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    factory: Callable[[], Any] | Any = field.default_factory
    return None if factory is MISSING else factory()


def _markdown(text: str) -> str:
    """Return docstring text with its mathematics in the form that the site renders, and a capital first."""
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    is_word = re.match(r"(?!theta\b)(a|[a-z][a-z]+)[ ,.]", text)  # not a symbol of a formula
    return text[0].upper() + text[1:] if is_word else text


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def write_pages(folder: Path) -> None:
    """Write every page into the folder and remove pages of methods that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for old in folder.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_traffic()
    write_pages(FOLDER)
