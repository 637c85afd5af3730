"""Three sites with a table each and no code: what leaves them, the pooled statistics, the simulator's model."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dqnfed import Federation, RunResult, run
from dqnfed.cli import app as commands
from dqnfed.core.federation import split_rows
from dqnfed.core.problem import accuracy
from dqnfed.core.screening import Policy
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import build_algorithm, module_problem
from dqnfed.flower import InProcessGrid
from dqnfed.sim.state import Evaluation
from tests.helpers.hospitals import hospital_rows, write_csv
from tests.helpers.pages import blocks_of
from tests.helpers.repository import ROOT
from tests.helpers.superlink import BIN, PUBLIC, Deployment, free_port

SCHEMA = """
label = "outcome"
classes = ["died", "survived"]

[columns.age]
kind = "number"
low = 0
high = 130

[columns.pressure]
kind = "number"

[columns.smokes]
kind = "category"

[columns.ward]
kind = "category"
categories = ["A", "B"]

[split]
test = 0.2
seed = 3
"""
NAMES = ("Avon", "Brook", "Cedar")
EXACT = ["run.dtype='float64'", "eval.every=2", "eval.participants=false"]
ROUNDS = 2
INIT = ("site", "init", "new", "--data", "no.csv", "--name", "x", "--number", "0")
Rows = list[dict[str, str]]


def called(*words: object) -> str:
    done = CliRunner().invoke(commands, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def site_rows(name: str) -> Rows:
    rows = [row for row in hospital_rows(missing=0.1) if row["hospital"] == name]
    for row in rows[:3]:
        row["smokes"] = f"secret of {name}"  # three rows: not to be named
    return rows


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The app and three sites' folders, made by the commands of the guide."""
    folder = tmp_path_factory.mktemp("sites")
    (folder / "schema.toml").write_text(SCHEMA)
    called("new-app", folder / "clinics", "--clients", 3, "--rounds", ROUNDS, "--table", folder / "schema.toml")
    for number, name in enumerate(NAMES):
        (folder / f"at-{name}").mkdir()
        table = write_csv(folder / f"at-{name}" / "patients.csv", site_rows(name))
        about = ("--schema", folder / "schema.toml", "--name", name, "--number", number)
        called("site", "init", folder / f"site{number}", "--data", table, *about)
    return folder


def numbers(rows: Rows, column: str) -> np.ndarray:
    return np.array([float(row[column] or "nan") for row in rows])


def training_rows() -> list[tuple[Rows, Rows]]:
    """Return the training and test rows of every site."""
    found = []
    for number, name in enumerate(NAMES):
        rows = site_rows(name)
        labels = torch.tensor([["died", "survived"].index(row["outcome"]) for row in rows])
        parts = split_rows(len(rows), labels, {"test": 0.2, "validation": 0.0}, seed=3, client=number)
        found.append(tuple([rows[i] for i in parts[part]] for part in ("train", "test")))
    return found  # type: ignore[return-value]


def pooled_inputs(rows: Rows, training: Rows) -> torch.Tensor:
    """Return the inputs by the means, spreads and categories of the pooled training rows, in NumPy."""
    blocks = []
    for column in ("age", "pressure"):
        known, values = numbers(training, column), numbers(rows, column)
        scaled = (values - np.nanmean(known)) / np.nanstd(known)
        blocks += [np.where(np.isnan(values), 0, scaled), np.isnan(values).astype(float)]
    for column, categories in (("smokes", ["", "current", "former", "never"]), ("ward", ["A", "B", ""])):
        blocks += [np.array([float(row[column] == category) for row in rows]) for category in categories]
    return torch.from_numpy(np.stack(blocks, axis=1).astype(np.float32))


def simulated(home: Path) -> RunResult:
    """Return the simulator's run on pooled statistics: no code of the sites but their split."""
    config = read_config(str(home / "clinics/clinics/experiment.toml"), [*EXACT, f"train.rounds={ROUNDS}"])
    sites = training_rows()
    pooled = [row for train, _ in sites for row in train]

    def pairs(part: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (
                pooled_inputs(site[part], pooled),
                torch.tensor([["died", "survived"].index(row["outcome"]) for row in site[part]]),
            )
            for site in sites
        ]

    federation = Federation.from_clients(pairs(0), test=pairs(1), names=NAMES, n_classes=2)
    problem = module_problem(config, (11,), 2, "cross-entropy", ("accuracy", accuracy))
    evaluation = Evaluation(**config.eval.model_dump(exclude={"score"}))
    policy = Policy(**config.policy.model_dump())
    method = build_algorithm(config)
    return run(method, problem, federation, rounds=ROUNDS, seed=0, evaluation=evaluation, policy=policy)


def assert_as_pooled(out: Path, expected: RunResult) -> None:
    """Statistics to 1e-9, the model to 1e-6, the scores, and a report."""
    learnt = json.loads((out / "features.json").read_text())["preprocessing"]
    sites = training_rows()
    pooled = [row for train, _ in sites for row in train]
    for column in learnt["numeric"]:
        known = numbers(pooled, column["name"])
        assert column["mean"] == pytest.approx(np.nanmean(known), rel=1e-9)
        assert column["std"] == pytest.approx(np.nanstd(known), rel=1e-9)
        assert column["has_holes"]
    assert [c["categories"] for c in learnt["categorical"]] == [["", "current", "former", "never"], ["A", "B", ""]]
    result = RunResult.load(out)
    assert (result.theta - expected.theta).abs().max() <= 1e-6
    assert result.summary["accuracy"] == pytest.approx(expected.summary["accuracy"])
    assert [client["name"] for client in result.clients] == list(NAMES)
    assert (out / "report.html").stat().st_size > 10_000


QUESTION_REPLIES = ({"client", "name", "schema", "rows", "training", "numbers", "categories"}, {"client", "stored"})
TRAINING_REPLY = {"client", "kind", "forgot"}
EVALUATION_REPLY = {"client", "name", "group", "models", "forgot"}
MEASURED = {"loss", "scores", "losses", "n-train", "n-test", "n-validation"}


def assert_only_listed(contents: list[Mapping[str, Any]], n_parameters: int) -> None:
    """Check every message that left a site, field by field."""
    kinds = set()
    for content in contents:
        kinds.add(kind := tuple(sorted(content)))
        if kind == ("answer",):
            answer = json.loads(content["answer"]["json"])
            assert set(answer) in QUESTION_REPLIES
            for values in answer.get("numbers", {}).values():
                assert len(values) == 4
            assert set(answer.get("categories", {})) <= {"smokes"}
            assert "secret" not in json.dumps(answer)
        elif kind == ("about", "update"):
            assert set(content["about"]) == TRAINING_REPLY
            for shape in content["update"].values():
                assert shape in ([], [1], [n_parameters])  # numbers about all rows, or one for each parameter
        else:
            assert kind == ("about", "evaluation")
            assert set(content["about"]) == EVALUATION_REPLY
            assert set(content["evaluation"]) == MEASURED
            assert len(content["evaluation"]["scores"]) <= 1
    assert kinds == {("answer",), ("about", "update"), ("about", "evaluation")}


RECORDER = '''

def recorded(content):
    """Return the names and values of a message; of arrays, their shapes."""
    from flwr.app import ArrayRecord

    return {
        name: {key: list(value.shape) if isinstance(record, ArrayRecord) else value for key, value in record.items()}
        for name, record in content.items()
    }


def watched(message, context):
    import json, uuid
    from pathlib import Path

    reply = honest(message, context)
    (Path(FOLDER) / f"{uuid.uuid4().hex}.json").write_text(json.dumps(recorded(reply.content)))
    return reply


honest = app
app = type(honest)()
app.train()(watched)
app.evaluate()(watched)
app.query("question")(watched)
'''


@pytest.fixture
def package(home: Path, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Return how to import a module of a copy of the app, whose sites' replies are written to a folder."""
    import shutil

    shutil.copytree(home / "clinics", tmp_path / "app")
    (tmp_path / "sent").mkdir()
    client = tmp_path / "app" / "clinics" / "client_app.py"
    client.write_text(client.read_text() + RECORDER.replace("FOLDER", repr(str(tmp_path / "sent"))))
    sys.path.insert(0, str(tmp_path / "app"))
    yield lambda name: importlib.import_module(f"clinics.{name}")
    sys.path.remove(str(tmp_path / "app"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "clinics"]:
        del sys.modules[name]


def in_process(home: Path, package: Callable[[str], Any], out: Path, **more: Any) -> Any:
    settings = {"clients": 3, "rounds": ROUNDS, "seed": 0, "out": str(out), "wait": 5, "set": "; ".join(EXACT), **more}
    grid = InProcessGrid(package("client_app").app, 3, run_config=settings)
    for number, context in enumerate(grid.contexts.values()):
        context.node_config["site"] = str(home / f"site{number}")
    return package("server_app").trained(grid, settings)


def test_there_is_no_code_to_write(home: Path) -> None:
    names = {path.name for path in (home / "clinics").rglob("*.py")}
    assert names == {"__init__.py", "__main__.py", "client_app.py", "server_app.py"}
    assert (home / "clinics/clinics/schema.toml").read_text() == SCHEMA


def test_sites_train_the_simulators_model_and_nothing_else_leaves(
    home: Path, tmp_path: Path, package: Callable[[str], Any]
) -> None:
    in_process(home, package, tmp_path / "run")
    expected = simulated(home)
    assert_as_pooled(tmp_path / "run", expected)
    sent = [json.loads(path.read_text()) for path in (tmp_path / "sent").iterdir()]
    assert_only_listed(sent, len(expected.theta))
    answers = [json.loads(content["answer"]["json"]) for content in sent if "answer" in content]
    for column in ("age", "pressure"):
        missing = sum(answer["numbers"][column][3] for answer in answers if "numbers" in answer)
        assert missing == sum(row[column] == "" for name in NAMES for row in site_rows(name))
    said = called("predict", tmp_path / "run", home / "at-Avon/patients.csv").splitlines()
    assert said[0] == "id,class,probability_died,probability_survived,unseen,out_of_range"
    assert [line.split(",")[4] for line in said[1:5]] == ["smokes", "smokes", "smokes", ""]


def test_a_run_does_not_go_on_with_other_tables(home: Path, tmp_path: Path, package: Callable[[str], Any]) -> None:
    out, table = tmp_path / "run", home / "at-Cedar/patients.csv"
    in_process(home, package, out, resume=True)
    (out / "summary.json").unlink()  # as if it had been killed
    (out / "checksums.json").unlink()
    before = table.read_text()
    write_csv(table, [{**row, "age": f"{min(float(row['age'] or 50) + 1, 130):.1f}"} for row in site_rows("Cedar")])
    try:
        with pytest.raises(ValueError, match="cannot go on: the sites' statistics are others"):
            in_process(home, package, out, resume=True)
    finally:
        table.write_text(before)


def test_check_lists_what_leaves_and_sends_nothing(home: Path) -> None:
    said = called("site", "check", home / "site1")
    train = training_rows()[1][0]
    ages = numbers(train, "age")
    assert "What leaves site 1 (Brook), and nothing else:" in said
    assert f"120 rows with a label, {len(train)} of them for training" in said
    assert f"age: {int((~np.isnan(ages)).sum())} known values in training, mean {np.nanmean(ages):.6g}" in said
    assert "'current', 'former', 'never'" in said
    assert "secret" not in said
    assert (home / "site1" / "key").stat().st_mode & 0o077 == 0


def test_the_guides_schema_and_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(ROOT / "docs/how-to/deploy-tables.md")
    (schema,) = [block.code for block in blocks if block.language == "toml"]
    Path("schema.toml").write_text(schema)
    write_csv(Path("patients.csv"), [row for row in hospital_rows(missing=0.1) if row["hospital"] == "Avon"])
    lines = [line for block in blocks if block.language == "bash" for line in block.code.splitlines()]
    assert [line.split()[1:3] for line in lines] == [
        ["new-app", "clinics"], ["site", "init"], ["site", "check"], ["site", "run"], ["run", "clinics"],
    ]  # fmt: skip
    for line in lines[:3]:
        called(*line.split()[1:])
    assert Path("clinics/clinics/schema.toml").read_text() == schema
    assert Path("avon/key.pub").is_file()


@pytest.mark.slow
def test_a_label_that_is_a_number_is_learnt_in_its_own_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the app's own command, on one machine, before anything is deployed."""
    monkeypatch.chdir(tmp_path)
    columns = '[columns.age]\nkind = "number"\n[columns.smokes]\nkind = "category"\n'
    Path("schema.toml").write_text(f'label = "pressure"\n{columns}')
    called("new-app", "clinics", "--clients", 3, "--rounds", 3, "--table", "schema.toml")
    for number, name in enumerate(NAMES):
        write_csv(Path(f"{name}.csv"), site_rows(name))
        about = ("--schema", "schema.toml", "--name", name, "--number", number)
        called("site", "init", f"site{number}", "--data", f"{name}.csv", *about)
    assert "pressure (label): " in called("site", "check", "site0")
    command = [sys.executable, "-m", "clinics", *(str(tmp_path / f"site{number}") for number in range(3))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd="clinics", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    learnt = json.loads(Path("clinics/run-tryout/features.json").read_text())
    pooled = []
    for number, name in enumerate(NAMES):
        values = numbers([row for row in site_rows(name) if row["pressure"]], "pressure")
        parts = split_rows(
            len(values), torch.from_numpy(values), {"test": 0.2, "validation": 0.0}, seed=0, client=number
        )
        pooled.append(values[parts["train"].numpy()])
    assert learnt["target_mean"] == pytest.approx(np.concatenate(pooled).mean(), rel=1e-9)
    assert learnt["target_std"] == pytest.approx(np.concatenate(pooled).std(), rel=1e-9)
    said = called("predict", "clinics/run-tryout", "Avon.csv").splitlines()
    assert said[0] == "id,value,unseen"  # the schema names no range
    assert 100 < np.mean([float(line.split(",")[1]) for line in said[1:]]) < 160


def test_a_failing_site_tells_no_value_of_its_table(home: Path, tmp_path: Path, package: Callable[[str], Any]) -> None:
    table = home / "at-Cedar/patients.csv"
    before = table.read_text()
    rows = site_rows("Cedar")
    rows[7]["age"] = "777"
    write_csv(table, rows)
    try:
        with pytest.raises(ValueError, match=r"clients \[2\] gave no usable answer.*errors\.log") as caught:
            in_process(home, package, tmp_path / "run")
    finally:
        table.write_text(before)
    assert "777" not in str(caught.value)
    assert "777" in (home / "site2" / "errors.log").read_text()
    assert not (tmp_path / "run").exists()


def test_another_schema_is_refused_by_the_site(home: Path, tmp_path: Path, package: Callable[[str], Any]) -> None:
    schema = tmp_path / "app/clinics/schema.toml"
    schema.write_text(SCHEMA + '\n[columns.postcode]\nkind = "category"\n')  # the server wants more than was agreed
    with pytest.raises(ValueError, match=r"clients \[0, 1, 2\] gave no usable answer"):
        in_process(home, package, tmp_path / "run")
    assert "not the one that this site agreed to" in (home / "site0" / "errors.log").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("site", "check", "nowhere"), "nowhere is no site"),
        ((*INIT, "--schema", "SCHEMA"), "no table no.csv"),
        ((*INIT, "--schema", "no.toml"), "no schema no.toml"),
        (("site", "run", "nowhere", "--superlink", "localhost:1", "--ca", "no.crt"), "no.crt does not exist"),
    ],
)
def test_mistakes_are_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(home / "schema.toml") if word == "SCHEMA" else word for word in words]
    assert message in str(CliRunner().invoke(commands, given).exception)


@pytest.mark.slow
def test_three_folders_three_processes_and_tls(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """SuperLink, proxy and three nodes as the guides start them; each node has its own folder and its own table."""
    made = Deployment(tmp_path_factory.mktemp("deployment"))
    made.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    sent = made.folder / "sent"
    sent.mkdir()
    client = home / "clinics/clinics/client_app.py"
    before = client.read_text()
    try:
        made.open()
        for number in range(3):
            key = home / f"site{number}" / "key.pub"
            assert made.flwr("supernode", "register", str(key), "mine").returncode == 0
            words = ["site", "run", str(home / f"site{number}"), "--superlink", f"{PUBLIC}:{made.port}"]
            made.start(f"site{number}", [str(BIN / "python"), "-m", "dqnfed", *words, "--port", str(free_port())])
        made.wait_for_nodes(3)
        client.write_text(before + RECORDER.replace("FOLDER", repr(str(sent))))
        settings = {"out": str(home / "run"), "rounds": ROUNDS, "set": "; ".join(EXACT)}
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        done = made.run(home / "clinics", text)
        assert (home / "run" / "summary.json").is_file(), done.stdout[-4000:] + made.log("site0")[-3000:]
        for number in range(3):
            log = made.log(f"site{number}")
            assert log.index("What leaves site") < log.index("Starting Flower SuperNode")  # listed first
    finally:
        client.write_text(before)
        made.close()
    expected = simulated(home)
    assert_as_pooled(home / "run", expected)
    assert_only_listed([json.loads(path.read_text()) for path in sent.iterdir()], len(expected.theta))
