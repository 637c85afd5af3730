"""Both sides of a federation of tables: schema and statistics first, then the training, without a line of code."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dqnfed.core.problem import Problem
from dqnfed.core.run_folder import write_atomically
from dqnfed.data.raw import DataError
from dqnfed.data.schema import Schema, read_schema
from dqnfed.data.statistics import agreed, checked_statistics
from dqnfed.experiments.config import Config
from dqnfed.experiments.data_source import score_called
from dqnfed.experiments.deploy import deployed_client, deployed_strategy
from dqnfed.experiments.experiment import module_problem
from dqnfed.experiments.own_data import FEATURES_FILE, Columns, columns_in, columns_text
from dqnfed.experiments.site import Site, load_site, site_federation, statistics_of

if TYPE_CHECKING:
    from dqnfed.flower.client import Client
    from dqnfed.flower.strategy import Strategy

logger = logging.getLogger("dqnfed")
T = TypeVar("T")
STATISTICS, AGREED = "statistics", "agreed"  # the two questions


class SiteFailed(RuntimeError):
    """What the server learns of a failure: that there was one."""


def table_problem(config: Config, schema: Schema, columns: Columns) -> Problem:
    """Return the model for the agreed inputs; server and sites build the same."""
    name, score = score_called(config.eval.score, is_regression=not schema.classes)
    loss = "cross-entropy" if schema.classes else "squared-error"
    return module_problem(config, (columns.preprocessing.n_inputs,), len(schema.classes) or 1, loss, (name, score))


# The site's side.


def site_of(node_config: Mapping[str, Any], number: int) -> Site:
    """Return the site that this node serves: `site` of its node config is its folder."""
    if "site" not in node_config:
        raise ValueError("this node serves no site; start it with `dqnfed site run`.")
    site = load_site(Path(str(node_config["site"])))
    if site.number != number:
        raise ValueError(f"the node is client {number}, but its site has the number {site.number}.")
    return site


def within_site(site: Site, work: Callable[[], T]) -> T:
    """Return what the work gives; of an error the server learns nothing but that it happened."""
    try:
        return work()
    except Exception as error:
        with (site.folder / "errors.log").open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {traceback.format_exc()}\n")
        raise SiteFailed(
            f"site {site.number} cannot go on ({type(error).__name__}); the reason is in errors.log of its folder, and "
            "`dqnfed site check` there says more."
        ) from None


def site_reply(
    question: Mapping[str, Any], node_config: Mapping[str, Any], number: int, run: str, schema: Schema
) -> dict[str, Any]:
    """Return the answer to one of the two questions; what was agreed is kept in the site's folder."""
    site = site_of(node_config, number)

    def answered() -> dict[str, Any]:
        if site.schema != schema:
            raise DataError("the app's schema is not the one that this site agreed to (schema.toml of its folder).")
        if question["about"] == STATISTICS:
            return {"name": site.name, **statistics_of(site)}
        columns_in(question["columns"])  # refused here if it cannot be read
        write_atomically(agreed_path(site, run), json.dumps(question["columns"]))
        return {"stored": True}

    return within_site(site, answered)


def agreed_path(site: Site, run: str) -> Path:
    return site.folder / f"agreed-{run}.json"


def site_client(node_config: Mapping[str, Any], number: int, run: str, config: Config, schema: Schema) -> Client:
    """Return what this site brings to the training."""
    site = site_of(node_config, number)

    def described() -> Client:
        columns = columns_in(json.loads(agreed_path(site, run).read_text(encoding="utf-8")))
        problem = table_problem(config, schema, columns)
        return deployed_client(config, problem, site_federation(site, columns))

    return within_site(site, described)


# The server's side.


def federated_columns(answers: Mapping[int, Mapping[str, Any]], schema: Schema) -> Columns:
    """Return what the sites' statistics say about the columns, or raise with the site whose are not possible."""
    checked = []
    for client, answer in answers.items():
        try:
            checked.append(checked_statistics(answer, schema))
        except DataError as error:
            raise DataError(f"the statistics of site {client} are refused: {error}") from error
    preprocessing, target = agreed(checked, schema)
    if target is None:
        return Columns(preprocessing, schema.classes)
    return Columns(preprocessing, (), target.mean, target.std)


def trained_on_tables(
    ask: Callable[[Mapping[str, Any]], dict[int, dict[str, Any]]],
    config: Config,
    schema: Schema,
    run_config: Mapping[str, Any],
) -> Strategy:
    """Return the strategy after schema and statistics are agreed: its folder has `features.json`, for `predict`."""
    columns = federated_columns(ask({"about": STATISTICS}), schema)
    content = json.loads(columns_text(columns))
    ask({"about": AGREED, "columns": content})
    strategy = deployed_strategy(
        config, table_problem(config, schema, columns), run_config, {FEATURES_FILE: columns_text(columns)}
    )
    before = None if strategy.out is None else strategy.out / FEATURES_FILE
    if before is not None and before.is_file() and before.read_text(encoding="utf-8") != columns_text(columns):
        raise DataError(
            f"{strategy.out} cannot go on: the sites' statistics are others than when it began, so their tables have "
            "changed. Begin a new run with resume=false, or put the tables back."
        )
    logger.info("%d inputs from %d columns", columns.preprocessing.n_inputs, len(schema.columns))
    return strategy


def app_schema(folder: Path) -> Schema:
    """Return the schema of an app."""
    return read_schema(folder / "schema.toml")
