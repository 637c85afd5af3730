"""Use what came out of a run: predictions, and the model in a file that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dqnfed.cli.common import Quiet, app, console


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    data: Annotated[Path, typer.Argument(help="A table with the columns of training, or .npy, .npz (array x), .csv.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write there instead of to the terminal.")] = None,
    id_column: Annotated[
        str | None,
        typer.Option("--id", metavar="COLUMN", help="The column that names the rows. Default: id, else 1, 2, ..."),
    ] = None,
    classes_only: Annotated[
        bool, typer.Option("--classes-only", help="One class (or value) a line, without header.")
    ] = False,
) -> None:
    """Write a CSV table with the trained model's prediction for every row of a file.

    Its columns: id, class, the probability of each class (for regression, the value in the target's own units instead),
    then the names of the row's columns whose category is new (unseen) and whose number lies outside training's range
    (out_of_range).

    Examples:  dqnfed predict runs/clinics new.csv --out predicted.csv  |  dqnfed predict runs/digits new.npy
    |  dqnfed predict runs/clinics new.csv --id patient
    """
    from dqnfed.experiments.predict import predictions

    found = predictions(folder, data, id_column)
    text = "".join(f"{answer}\n" for answer in found.answers()) if classes_only else found.csv_text()
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    model: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .onnx, .pt2 or .safetensors.")],
    quiet: Quiet = False,
) -> None:
    """Write the trained model as ONNX, as a program for torch, or as bare parameters; the file's name says which.

    FILE.onnx (extra `onnx`) reads the table's own columns. FILE.pt2 and FILE.safetensors read numbers; pipeline.json,
    which is written beside them, says how columns become these.

    Examples:  dqnfed export runs/clinics model.onnx  |  dqnfed export runs/clinics model.pt2
    |  dqnfed export runs/clinics model.safetensors
    """
    from dqnfed.experiments.export import export as write

    for path in write(folder, model):
        if not quiet:
            console.print(escape(f"model: {path}" if path == model else f"how to use it: {path}"), soft_wrap=True)
