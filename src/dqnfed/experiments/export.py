"""The trained model in a file that other programs read: ONNX, a program for torch, or bare parameters."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dqnfed.core.checksums import refuse_damaged
from dqnfed.core.run_folder import RunFolder, write_atomically
from dqnfed.experiments.pipeline import FILE, pipeline_of, run_columns
from dqnfed.experiments.predict import trained_run

SUFFIXES = (".onnx", ".pt2", ".safetensors")
ROWS = 3  # of the example that is traced; any other number works as well


class Answer(nn.Module):
    """A model that ends in the answer: the classes' probabilities, or values in the target's own units."""

    def __init__(self, module: nn.Module, answer: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.answer = answer

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.module(inputs)
        if "classes" in self.answer:
            return outputs.softmax(-1)
        std, mean = float(self.answer["std"]), float(self.answer["mean"])
        return outputs.squeeze(-1).double() * std + mean


def export(run: Path, file: Path) -> list[Path]:
    """Write the model of a finished run as the file's suffix says; return what was written."""
    if file.suffix not in SUFFIXES:
        raise ValueError(
            f"{file.name} must end in one of {', '.join(SUFFIXES)}: the suffix says what is written. .onnx is for "
            "onnxruntime and many others, .pt2 for torch alone, .safetensors for the bare parameters."
        )
    if not (run / "model.safetensors").is_file():
        raise FileNotFoundError(f"{run} has no trained model yet; `dqnfed resume {run}` finishes the run.")
    refuse_damaged(run)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".safetensors" and RunFolder(run).read_model()[1].get("model") is None:
        shutil.copyfile(run / "model.safetensors", file)  # a module of the user's own: only its parameters are known
        return [file]
    result = trained_run(run)
    pipeline = pipeline_of(result, run_columns(run))
    if file.suffix == ".onnx":
        from dqnfed.experiments.onnx_graph import write_onnx

        write_onnx(file, Answer(result.model(), pipeline["answer"]).eval(), pipeline)
        return [file]
    written = write_pipeline(file.parent / FILE, pipeline)
    if file.suffix == ".safetensors":
        shutil.copyfile(run / "model.safetensors", file)
    else:
        write_program(file, Answer(result.model(), pipeline["answer"]).eval(), pipeline)
    return [file, written]


def write_pipeline(path: Path, pipeline: dict[str, Any]) -> Path:
    """Write pipeline.json; one of another model is left alone, since that model could not be used without it."""
    text = json.dumps(pipeline, indent=1, ensure_ascii=False) + "\n"
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise FileExistsError(
            f"{path} belongs to another model; export into a folder of its own, or remove {path} first."
        )
    write_atomically(path, text)
    return path


def example_inputs(pipeline: dict[str, Any], n_rows: int = ROWS) -> Tensor:
    """Return inputs of the model's shape and type."""
    shape, kind = (n_rows, *pipeline["inputs"]["shape"]), getattr(torch, pipeline["inputs"]["type"])
    if not kind.is_floating_point:
        return torch.ones(shape, dtype=kind)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=kind)


def traced(model: nn.Module, pipeline: dict[str, Any]) -> torch.export.ExportedProgram:
    """Return the model as a program of torch's operators, for any number of rows."""
    rows = ({0: torch.export.Dim("rows", min=1)},)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            return torch.export.export(model, (example_inputs(pipeline),), dynamic_shapes=rows)
    except Exception as error:  # torch raises many kinds
        raise ValueError(
            f"torch cannot export the model '{pipeline['model']['name']}' ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no more is known'}); export it as .safetensors."
        ) from error


def write_program(file: Path, model: nn.Module, pipeline: dict[str, Any]) -> None:
    """Write a .pt2 file, then read it back: its answers must be the model's."""
    program = traced(model, pipeline)
    part = file.with_name(f".{file.stem}.part.pt2")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(program, part)
            again = torch.export.load(part).module()
        inputs = example_inputs(pipeline, ROWS + 4)
        with torch.no_grad():
            torch.testing.assert_close(again(inputs), model(inputs), rtol=1e-5, atol=1e-6)
        part.replace(file)
    except AssertionError as error:
        raise ValueError(f"the exported program does not answer as the model does: {error}") from error
    finally:
        part.unlink(missing_ok=True)
