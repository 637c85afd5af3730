"""A new method in a clone of this repository: `dqnfed new-method NAME`."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from dqnfed.algorithms import OPTIONAL, REGISTRY

TEMPLATES = {  # template -> names that its test imports from the method's file, besides the class
    "one-phase": ("Server", "Update"),
    "two-phase": (),
}
METHODS = Path("src/dqnfed/algorithms")
REGISTRY_FILE = METHODS / "__init__.py"
TESTS = Path("tests/unit/algorithms")
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LEADING_ZERO = re.compile(r"(?<!\d)0+(?=\d)")
LONGEST = 32  # characters of a name; the lines that have it then fit into 120
WORDS = ("class", "module", "imports")  # that are filled in where a template has them between two @


class Written(NamedTuple):
    """What was written, and the commands to run next in the repository's root."""

    root: Path
    method: Path  # these three relative to the root
    test: Path
    registry: Path
    commands: tuple[str, ...]


def new_method(name: str, *, template: str = "one-phase", root: Path | None = None) -> Written:
    """Write a method, its test and its line in the registry, or nothing at all; `root` is the clone's folder."""
    if template not in TEMPLATES:
        raise ValueError(f"the template must be one of {', '.join(TEMPLATES)}, but is '{template}'.")
    _check_name(name)
    root = clone_at(root) if root is not None else clone_above(Path.cwd())
    module, kind = module_name(name), class_name(name)
    method, test = METHODS / f"{module}.py", TESTS / f"test_{module}.py"
    texts = {path: _template(f"{template}{part}.py.txt") for path, part in ((method, ""), (test, "-test"))}
    registry = (root / REGISTRY_FILE).read_text(encoding="utf-8")
    _check_free(name, registry, texts.values())
    for path in (METHODS / module, method, test):
        if (root / path).exists():
            raise FileExistsError(f"{root / path} exists already and is never written over; choose another name.")
    imports = ", ".join(sorted([kind, *TEMPLATES[template]], key=_member_key))
    words = dict(zip(WORDS, (kind, module, imports), strict=True))
    filled = {root / path: _filled(text, words) for path, text in texts.items()}
    _write(filled, root / REGISTRY_FILE, with_entry(registry, name))
    tests = f'.venv/bin/python -m pytest {test.as_posix()} tests/contract -k "{name} or {module}"'
    return Written(root, method, test, REGISTRY_FILE, (tests, "make reference", "make test"))


def module_name(name: str) -> str:
    """Return the name of a method's module: its words joined by underscores."""
    return name.replace("-", "_")


def class_name(name: str) -> str:
    """Return the name of a method's class: its words with capitals."""
    return "".join(word.capitalize() for word in name.split("-"))


def clone_at(folder: Path) -> Path:
    """Return the folder if it is the root of a clone."""
    if not _is_clone(folder):
        raise FileNotFoundError(
            f"--root must name the root of a clone of the dqnfed repository, with {REGISTRY_FILE} and {TESTS} in it, "
            f"but is {folder}, which has not both of them; name the folder that has."
        )
    return folder


def clone_above(folder: Path) -> Path:
    """Return the root of the clone that the folder is in."""
    for candidate in (folder, *folder.parents):
        if _is_clone(candidate):
            return candidate
    raise FileNotFoundError(
        f"a new method is written into a clone of the dqnfed repository, but neither {folder} nor a folder above it "
        f"has {REGISTRY_FILE} and {TESTS}; run this inside a clone, or name its root with --root DIR. A package of "
        "your own registers methods without a clone: see docs/how-to/add-a-method.md."
    )


def with_entry(registry: str, name: str) -> str:
    """Return the text of the registry with the method's import in alphabetical order and its line at the end."""
    tree, lines = _parsed(registry), registry.splitlines(keepends=True)
    package, module, kind = "dqnfed.algorithms.", module_name(name), class_name(name)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith(package)]
    table = _registry_dict(tree)
    if table is None or not imports or lines[(table.end_lineno or 0) - 1].strip() != "}":
        raise ValueError(
            f"{REGISTRY_FILE} must import methods from {package}* and list them in a dictionary REGISTRY, one line "
            "each, but it does not; restore the file, or add the method by hand."
        )
    later = [node.lineno for node in imports if _natural(f"{node.module}") > _natural(package + module)]
    place = later[0] - 1 if later else imports[-1].end_lineno or imports[-1].lineno
    lines.insert((table.end_lineno or 0) - 1, f'    "{name}": {kind},\n')  # the lower line first: others move down
    lines.insert(place, f"from {package}{module} import {kind}\n")
    return "".join(lines)


def _check_name(name: str) -> None:
    """Refuse a name that is not of the form of the others, or that Python cannot use."""
    if not NAME.fullmatch(name) or LEADING_ZERO.search(name):
        words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())
        better = LEADING_ZERO.sub("", "-".join(words))
        raise ValueError(
            "a method's name must be lower-case words joined by hyphens, of letters and digits, with a letter first "
            f"and no number that starts with 0, but is '{name}'"
            + (f"; try '{better}'." if NAME.fullmatch(better) else "; try a name like 'trimmed-mean'.")
        )
    if len(name) > LONGEST:
        raise ValueError(
            f"a method's name must have at most {LONGEST} characters, but '{name}' has {len(name)}; shorten it."
        )
    for word, what in ((module_name(name), "module"), (class_name(name), "class")):
        if keyword.iskeyword(word) or (what == "class" and hasattr(builtins, word)):
            raise ValueError(
                f"the {what} of a method must not have a name that Python itself uses, but that of '{name}' would be "
                f"called {word}; choose another name, such as 'fed-{name}'."
            )


def _check_free(name: str, registry: str, templates: Iterable[str]) -> None:
    """Refuse a name that is registered, or that the registry and the new files would use for two things."""
    if name in {*_registered(registry), *REGISTRY, *OPTIONAL}:
        raise ValueError(f"there is a method '{name}' already, see `dqnfed list algorithms`; choose another name.")
    registered = _bound(registry)  # modules too: importing one binds its name in the package
    used = registered.union(*(_bound(_filled(text, dict.fromkeys(WORDS, "_"))) for text in templates))
    for word, others in ((module_name(name), registered), (class_name(name), used)):
        if word in others:
            raise ValueError(
                f"every name must mean one thing, but '{name}' would need {word}, which {REGISTRY_FILE} or the new "
                "files use for something else; choose another name."
            )


def _write(new: dict[Path, str], registry: Path, registered: str) -> None:
    """Write the new files and replace the registry; where one of them fails, none is left."""
    done: list[Path] = []
    beside = registry.with_name(f".{registry.name}.new")
    try:
        for path, text in {**new, beside: registered}.items():
            with path.open("x", encoding="utf-8", newline="\n") as file:
                done.append(path)
                file.write(text)
        beside.replace(registry)
    except BaseException:
        for path in done:
            path.unlink(missing_ok=True)
        raise


def _is_clone(folder: Path) -> bool:
    return (folder / REGISTRY_FILE).is_file() and (folder / TESTS).is_dir()


def _parsed(registry: str) -> ast.Module:
    try:
        return ast.parse(registry)
    except SyntaxError as error:
        raise ValueError(f"{REGISTRY_FILE} must be Python, but line {error.lineno} is not; mend it first.") from error


def _registry_dict(tree: ast.Module) -> ast.Dict | None:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "REGISTRY":
            return node.value if isinstance(node.value, ast.Dict) else None
    return None


def _registered(registry: str) -> set[str]:
    table = _registry_dict(_parsed(registry))
    return set() if table is None else {str(key.value) for key in table.keys if isinstance(key, ast.Constant)}


def _bound(source: str) -> set[str]:
    """Return the names that a module gives to anything."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.alias):
            found.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _natural(text: str) -> list[tuple[int, int]]:
    """Return the sort key of import lines, in which 2 is before 10."""
    parts = re.findall(r"\d+|\D", text)
    return [(ord("0"), int(part)) if part.isdigit() else (ord(part), 0) for part in parts]


def _member_key(name: str) -> tuple[bool, list[tuple[int, int]]]:
    """Return the sort key of names in one import line: those in capitals throughout are constants, and first."""
    return not (name.isupper() and len(name) > 1), _natural(name.lower())


def _template(file: str) -> str:
    return (resources.files("dqnfed.experiments") / "method_template" / file).read_text(encoding="utf-8")


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text
