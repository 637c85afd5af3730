"""The trained model as ONNX, with the table's preprocessing inside: one input a column, class and probabilities out."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dqnfed.data.features import Preprocessing
from dqnfed.data.table import Table
from dqnfed.experiments.export import example_inputs, traced
from dqnfed.experiments.pipeline import FILE

OPSET = 20
ML_OPSET = 3  # of ai.onnx.ml, which has the one-hot encoder of texts
CLASS, PROBABILITIES, VALUE = "predicted_class", "probabilities", "value"  # outputs
TOLERANCE = 1e-5  # of probabilities, and of values in standard deviations of the target


def write_onnx(file: Path, model: nn.Module, pipeline: dict[str, Any]) -> None:
    """Write the model, after onnxruntime has given the same answers as torch, missing and unseen values included."""
    onnx, runtime = libraries()
    prefix = free_prefix(column_names(pipeline))
    whole = onnx.compose.add_prefix(network_graph(model, pipeline), prefix)
    if "columns" in pipeline:
        whole.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", ML_OPSET))
        read_columns(whole, pipeline, prefix)
    else:
        rename(whole, f"{prefix}inputs", "inputs")
    name_answers(whole, pipeline, prefix)
    whole.metadata_props.add(key=FILE, value=json.dumps(pipeline, ensure_ascii=False))
    onnx.checker.check_model(whole, full_check=True)
    check_answers(runtime, whole.SerializeToString(), model, pipeline)
    onnx.save_model(whole, str(file))


def libraries() -> tuple[Any, Any]:
    """Return onnx and onnxruntime."""
    try:
        import onnx
        import onnx.compose
        import onnxruntime
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ImportError as error:
        raise ImportError(
            f"writing ONNX needs {error.name}; install it with `pip install 'dqnfed[onnx]'`, or export as .pt2 or "
            ".safetensors."
        ) from error
    return onnx, onnxruntime


@contextmanager
def silent() -> Iterator[None]:
    """Keep torch's exporter from speaking about itself."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def network_graph(model: nn.Module, pipeline: dict[str, Any]) -> Any:
    """Return the ONNX model of the network alone: `inputs` to `answer`."""
    program = traced(model, pipeline)
    with silent():
        made = torch.onnx.export(
            program, (), dynamo=True, opset_version=OPSET, input_names=["inputs"], output_names=["answer"],
            verbose=False,
        )  # fmt: skip
    assert made is not None
    return made.model_proto


def column_names(pipeline: dict[str, Any]) -> list[str]:
    return [c["name"] for kind in ("numeric", "categorical") for c in pipeline.get("columns", {}).get(kind, [])]


def free_prefix(names: Sequence[str]) -> str:
    """Return a prefix that begins no column's name, for everything between the inputs and the outputs."""
    prefix = "dqnfed/"
    while any(name.startswith(prefix) for name in names):
        prefix = f"_{prefix}"
    return prefix


def rename(whole: Any, old: str, new: str) -> None:
    """Give a value of the graph another name, wherever it stands."""
    for node in whole.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in (*whole.graph.input, *whole.graph.output, *whole.graph.value_info):
        if value.name == old:
            value.name = new


def read_columns(whole: Any, pipeline: dict[str, Any], prefix: str) -> None:
    """Put the preprocessing in front: a number is [N, 1] doubles with NaN for a hole, a category [N, 1] texts with "".

    A missing number of a column that was never empty in training stays NaN: the answer is NaN and its class is empty.
    """
    onnx, _ = libraries()
    make, kinds, graph = onnx.helper, onnx.TensorProto, whole.graph
    nodes, inputs, blocks = [], [], []
    for i, column in enumerate(pipeline["columns"]["numeric"]):
        name, at = column["name"], f"{prefix}number{i}"
        inputs.append(make.make_tensor_value_info(name, kinds.DOUBLE, ["rows", 1]))
        for key in ("mean", "std"):
            graph.initializer.append(make.make_tensor(f"{at}/{key}", kinds.DOUBLE, [], [column[key]]))
        nodes += [
            make.make_node("Sub", [name, f"{at}/mean"], [f"{at}/centred"]),
            make.make_node("Div", [f"{at}/centred", f"{at}/std"], [f"{at}/scaled"]),
        ]
        if not column["missing"]:
            blocks.append(f"{at}/scaled")
            continue
        graph.initializer.append(make.make_tensor(f"{at}/zero", kinds.DOUBLE, [], [0.0]))
        nodes += [
            make.make_node("IsNaN", [name], [f"{at}/hole"]),
            make.make_node("Where", [f"{at}/hole", f"{at}/zero", f"{at}/scaled"], [f"{at}/filled"]),
            make.make_node("Cast", [f"{at}/hole"], [f"{at}/mark"], to=kinds.DOUBLE),
        ]
        blocks += [f"{at}/filled", f"{at}/mark"]
    for i, column in enumerate(pipeline["columns"]["categorical"]):
        name, at, categories = column["name"], f"{prefix}category{i}", column["categories"]
        inputs.append(make.make_tensor_value_info(name, kinds.STRING, ["rows", 1]))
        graph.initializer.append(make.make_tensor(f"{at}/shape", kinds.INT64, [2], [-1, len(categories)]))
        nodes += [
            make.make_node(
                "OneHotEncoder", [name], [f"{at}/hot"], domain="ai.onnx.ml", zeros=1,
                cats_strings=[text.encode() for text in categories],
            ),
            make.make_node("Reshape", [f"{at}/hot", f"{at}/shape"], [f"{at}/flat"]),
            make.make_node("Cast", [f"{at}/flat"], [f"{at}/double"], to=kinds.DOUBLE),
        ]  # fmt: skip
        blocks.append(f"{at}/double")
    kind = kinds.DOUBLE if pipeline["inputs"]["type"] == "float64" else kinds.FLOAT
    nodes += [
        make.make_node("Concat", blocks, [f"{prefix}all"], axis=1),
        make.make_node("Cast", [f"{prefix}all"], [f"{prefix}inputs"], to=kind),
    ]
    after = list(graph.node)
    del graph.node[:], graph.input[:]
    graph.node.extend([*nodes, *after])
    graph.input.extend(inputs)


def name_answers(whole: Any, pipeline: dict[str, Any], prefix: str) -> None:
    """Name the outputs: the class as text and the probabilities [N, C], or the value [N]."""
    onnx, _ = libraries()
    make, kinds, graph = onnx.helper, onnx.TensorProto, whole.graph
    taken = column_names(pipeline)
    if pipeline["task"] == "regression":
        rename(whole, f"{prefix}answer", free_name(VALUE, taken))
        return
    rename(whole, f"{prefix}answer", probabilities := free_name(PROBABILITIES, taken))
    classes = [name.encode() for name in pipeline["answer"]["classes"]]
    graph.initializer.extend(
        [
            make.make_tensor(f"{prefix}classes", kinds.STRING, [len(classes)], classes),
            make.make_tensor(f"{prefix}nothing", kinds.STRING, [], [b""]),
            make.make_tensor(f"{prefix}axis", kinds.INT64, [1], [1]),
        ]
    )
    graph.node.extend(
        [
            make.make_node("ArgMax", [probabilities], [f"{prefix}best"], axis=1, keepdims=0),
            make.make_node("Gather", [f"{prefix}classes", f"{prefix}best"], [f"{prefix}named"]),
            make.make_node("ReduceSum", [probabilities, f"{prefix}axis"], [f"{prefix}sum"], keepdims=0),
            make.make_node("IsNaN", [f"{prefix}sum"], [f"{prefix}none"]),
            make.make_node("Where", [f"{prefix}none", f"{prefix}nothing", f"{prefix}named"], [free_name(CLASS, taken)]),
        ]
    )
    graph.output.insert(0, make.make_tensor_value_info(free_name(CLASS, taken), kinds.STRING, ["rows"]))


def free_name(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name


def check_answers(runtime: Any, model_bytes: bytes, model: nn.Module, pipeline: dict[str, Any]) -> None:
    """Raise where onnxruntime's answers are not torch's, for rows with missing and unseen values too."""
    session = runtime.InferenceSession(model_bytes, providers=["CPUExecutionProvider"])
    if "columns" in pipeline:
        feed = example_rows(pipeline)
        columns = {name: values[:, 0] for name, values in feed.items()}
        inputs = torch.from_numpy(preprocessing_in(pipeline).apply(Table("the example", columns)))
        inputs = inputs.to(getattr(torch, pipeline["inputs"]["type"]))
    else:
        inputs = example_inputs(pipeline, 7)
        feed = {"inputs": inputs.numpy()}
    found = session.run(None, {name: array.astype(object) if array.dtype.kind == "U" else array
                               for name, array in feed.items()})[-1]  # fmt: skip
    with torch.no_grad():
        expected = model(inputs).numpy()
    scale = 1.0 if pipeline["task"] == "classification" else abs(pipeline["answer"]["std"])
    worst = float(np.abs(found - expected).max()) / scale
    if not worst <= TOLERANCE:
        raise ValueError(
            f"onnxruntime's answers differ from torch's by {worst:.1e}, more than {TOLERANCE:.0e}; nothing was "
            "written. Export the model as .pt2 or .safetensors."
        )


def example_rows(pipeline: dict[str, Any], n_rows: int = 64) -> dict[str, np.ndarray]:
    """Return [N, 1] values of every column: of training's range, with holes where training had some, and new texts."""
    random = np.random.default_rng(0)
    columns: dict[str, np.ndarray] = {}
    for column in pipeline["columns"]["numeric"]:
        values = random.normal(column["mean"], column["std"], n_rows)
        columns[column["name"]] = np.where((random.random(n_rows) < 0.2) & column["missing"], np.nan, values)[:, None]
    for column in pipeline["columns"]["categorical"]:
        texts = [*column["categories"], "".join(column["categories"]) + "?"]  # the last is none of them
        columns[column["name"]] = random.choice(np.array(texts, dtype=np.str_), n_rows)[:, None]
    return columns


def preprocessing_in(pipeline: dict[str, Any]) -> Preprocessing:
    """Return the preprocessing that a pipeline describes."""
    numeric = [
        {"has_holes" if key == "missing" else key: v for key, v in c.items()} for c in pipeline["columns"]["numeric"]
    ]
    return Preprocessing.from_json(json.dumps({**pipeline["columns"], "numeric": numeric}))
