"""The client's side on Flower: decode, one client step or one evaluation, encode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm, Empty, refuse_reference
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem, Task
from dqnfed.core.screening import Policy, prepared_with
from dqnfed.core.tensors import map_tensors, row
from dqnfed.flower.app import client_number
from dqnfed.flower.client_memory import NEVER, ClientMemory, Tag, Tags
from dqnfed.flower.privacy import Privacy, count_releases, noised
from dqnfed.flower.records import decoded, encoded, kind_named, named_arrays
from dqnfed.flower.secure_client import (
    form_products_reply,
    products_reply,
    secure_reply,
    shared_keys,
    summed_reply,
    unpad_reply,
    unpad_sums_reply,
)
from dqnfed.flower.secure_records import SECURE
from dqnfed.secure.keys import Identity
from dqnfed.secure.methods import secure_method
from dqnfed.secure.records import check_memory, step_on_records
from dqnfed.secure.sums import Number
from dqnfed.sim.accelerate import acceleration
from dqnfed.sim.clients import Measured, evaluate
from dqnfed.sim.sums import LOSS, PART_LOSS, PART_SCORE, SCORES, SQUARES, summed_score
from dqnfed.sim.tasks import TaskBuilder

ALONE = torch.zeros(1, dtype=torch.long)


@dataclass(frozen=True)
class Client:
    """What one client brings: the method and the problem, as the server has them, and its own data."""

    algorithm: AnyAlgorithm
    problem: Problem
    data: Federation  # of one client: `Federation.from_clients([(inputs, targets)])`, or `whole.only(number)`
    privacy: Privacy | None = None
    secure: Identity | None = None  # its key and the roster of keys: replies then leave under pads alone
    sums_only: bool = False  # with a key: what it measures leaves under pads too, for sums alone

    def __post_init__(self) -> None:
        refuse_reference(self.algorithm, "on Flower")
        if self.sums_only and self.secure is None:
            raise ValueError("`sums_only` needs `secure`, the client's key: without it nothing is padded.")
        if self.data.n_clients != 1:
            raise ValueError(
                f"a node holds the data of one client, but was given {self.data.n_clients}; "
                "use `federation.only(number)` for one client of a federation."
            )


def training_reply(client: Client, message: Message, context: Context) -> Message:
    """Return the reply to a training message."""
    return Message(_Request(client, message, context).train(), reply_to=message)


def evaluation_reply(client: Client, message: Message, context: Context) -> Message:
    """Return the reply to an evaluation message."""
    return Message(_Request(client, message, context).evaluate(), reply_to=message)


def query_reply(client: Client, message: Message, context: Context) -> Message:
    """Return the reply to a question of secure aggregation."""
    return Message(_Request(client, message, context).answer(), reply_to=message)


class _Request:
    """One message to a client, and what is needed to reply to it."""

    def __init__(self, client: Client, message: Message, context: Context) -> None:
        self._content: RecordDict = message.content
        about = message.content["about"]
        assert isinstance(about, ConfigRecord)
        self._about = about
        self._client, self._number = client, client_number(context)
        self._problem = acceleration().problem(client.problem)
        self._context = context
        self._algorithm = self._prepared()
        self._round = self._whole("round")
        self._tags = Tags(_tag(about["used"]), _tag(about["kept"]))
        self._check()
        seed = self._whole("seed")
        self._tasks = TaskBuilder(client.data, client.problem, self._algorithm, seed, numbers=[self._number])
        kind = self._algorithm.info.memory
        self._kept = None if kind is Empty else ClientMemory(context, str(about["run"]), self._number, kind)
        self._forgot = False

    def train(self) -> RecordDict:
        """Return the client's reply to a step; its new memory is kept."""
        if (self._client.secure is not None) != (SECURE in self._content):
            raise ValueError(
                f"client {self._number} replies {'under pads alone' if self._client.secure else 'in the open alone'}, "
                "but the server asks otherwise; give both the same `privacy.secure`."
            )
        kind = kind_named(self._algorithm.info.messages, str(self._about["kind"]))
        sent = decoded(kind, self._arrays("sent"), self._device)
        task = self._task()
        memory = self._memory(task)
        privacy, n_releases = self._client.privacy, 1
        if privacy is not None and privacy.unit == "record":
            update, memory, n_releases = step_on_records(self._algorithm, self._problem, task, sent, memory, privacy)
        else:
            update, memory = self._algorithm.client_step(self._problem, task, sent, memory)
        if privacy is not None:
            if privacy.noise == "local":
                count_releases(self._context, str(self._about["run"]), privacy, n_releases)
            update = noised(update, privacy, floor=self._problem.loss_floor)
        if self._kept is not None:
            self._kept.write(self._tags, (self._round, self._whole("phase")), memory)
        facts: dict[str, Any] = {"client": self._number, "kind": type(update).__name__, "forgot": self._forgot}
        if privacy is not None:
            facts["releases"] = n_releases
        if self._client.secure is not None:
            mine = self._client.secure, self._algorithm, self._number
            return secure_reply(*mine, update, sent, self._content, facts, self._context, privacy)
        return RecordDict({"update": encoded(update), "about": ConfigRecord(facts)})

    def answer(self) -> RecordDict:
        """Return the client's answer to a question about its padded reply, or a common key for all clients."""
        identity, question = self._client.secure, str(self._about.get("question"))
        if identity is None:
            raise ValueError(f"client {self._number} has no key for secure aggregation (`pad-key` of its node config).")
        if question == "share-key":
            return shared_keys(identity, self._number, self._about)
        if question == "unpad-sums":
            return unpad_sums_reply(identity, self._number, self._content, self._context)
        if question == "products":
            return products_reply(self._algorithm, self._number, self._content, self._context)
        if question == "form":
            return form_products_reply(identity, self._algorithm, self._number, self._content, self._context)
        bounds = float(self._about["rate-bounds"])  # type: ignore[arg-type]
        policy = Policy(rate_bounds=bounds or None)
        sizes = self._whole("n-clients"), self._whole("cohort-size")
        algorithm = prepared_with(self._method(), policy, self._client.problem, *sizes)
        return unpad_reply(identity, algorithm, self._number, self._content, self._context)

    def _method(self) -> AnyAlgorithm:
        """Return the method as this client runs it; with a key, as it can be run securely."""
        sizes = self._whole("n-clients"), self._whole("cohort-size")
        if self._client.secure is None:
            return self._client.algorithm
        return secure_method(self._client.algorithm, Policy(), self._client.problem, *sizes)

    def _prepared(self) -> AnyAlgorithm:
        sizes = self._whole("n-clients"), self._whole("cohort-size")
        return self._method().prepare(self._client.problem, *sizes)

    def evaluate(self) -> RecordDict:
        """Return the client's loss and scores at the models of the message, and who it is."""
        data, arrays = self._client.data, named_arrays(self._arrays("models"), self._device)
        if self._client.sums_only or self._about.get("sums"):
            return self._evaluate_for_sums(arrays)
        loss = math.nan
        if self._about["with-loss"]:
            theta = self._trained_model(arrays)
            loss = float(evaluate(self._problem, theta, data.train, ALONE, with_score=False).loss)
        found: dict[str, Measured] = {}
        if self._about["with-scores"]:
            examples = data.examples(str(self._about["part"]))  # type: ignore[arg-type]
            models = self._models(arrays)
            found = {name: evaluate(self._problem, theta, examples, ALONE) for name, theta in models.items()}
        numbers: dict[str, Any] = {
            "loss": loss,
            "scores": [float(each.scores) for each in found.values()],
            "losses": [float(each.loss) for each in found.values()],  # on the examples of the scores
        }
        return self._described(numbers, {"models": list(found), "forgot": self._forgot})

    def _described(self, numbers: dict[str, Any], facts: dict[str, Any]) -> RecordDict:
        """Return who the client is and how many examples it has, beside what it measured."""
        data = self._client.data
        who: dict[str, Any] = {
            "client": self._number,
            "name": data.names[0],
            "group": data.groups[0] if data.groups else "",
        }
        sizes = {
            "n-train": int(data.train.sizes[0]),
            "n-test": int(data.test.sizes[0]),
            "n-validation": 0 if data.validation is None else int(data.validation.sizes[0]),
        }
        return RecordDict({"evaluation": MetricRecord({**numbers, **sizes}), "about": ConfigRecord({**who, **facts})})

    def _evaluate_for_sums(self, arrays: dict[str, Tensor]) -> RecordDict:
        """Return what is to be summed, under pads, and who the client is; nothing that it measured in the open."""
        names: Any = self._about.get("sums", [])
        is_padded, is_open = SECURE in self._content, self._about["with-loss"] or self._about["with-scores"]
        if not self._client.sums_only or (not is_padded if names else is_open):
            how = "for sums under pads alone" if self._client.sums_only else "in the open"
            raise ValueError(
                f"client {self._number} gives losses and scores {how} (`eval.metrics`), but the server asks otherwise; "
                "give both the same settings."
            )
        content = self._described({}, {"forgot": self._forgot})
        if names:
            identity, numbers = self._client.secure, self._numbers(names, arrays)
            assert identity is not None
            known = identity, self._number, numbers, arrays, self._content, self._context
            content["padded"] = summed_reply(*known)
        return content

    def _numbers(self, names: Sequence[str], arrays: dict[str, Tensor]) -> list[Number]:
        """Return the numbers of a question for sums, in its order."""
        problem, data, is_squared = self._problem, self._client.data, SQUARES in names
        models, examples = self._models(arrays), data.examples(str(self._about["part"]))  # type: ignore[arg-type]
        found: list[Number] = []
        for name in names:
            if name == LOSS:
                loss = evaluate(problem, self._trained_model(arrays), data.train, ALONE, with_score=False).loss
                found.append(Number(float(loss)))
            elif name in (SCORES, PART_SCORE):
                wanted = models.values() if name == SCORES else list(models.values())[:1]
                scores = [float(evaluate(problem, theta, examples, ALONE).scores) for theta in wanted]
                found += [Number(summed_score(problem, score), is_squared and name == SCORES) for score in scores]
            elif name == PART_LOSS:
                found.append(Number(float(evaluate(problem, next(iter(models.values())), examples, ALONE).loss)))
            elif name != SQUARES:
                raise ValueError(f"client {self._number} measures nothing that is called '{name}'.")
        return found

    def _models(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the models to evaluate: those that were sent or, where they are the client's own, from its memory."""
        if self._algorithm.info.personal:
            server = self._algorithm.init_server(self._problem, self._whole("n-clients"))
            return self._algorithm.models(server._replace(theta=arrays["theta"]), self._memory(self._task()))
        names, places = self._about["models"], self._about["places"]
        assert isinstance(names, list)
        assert isinstance(places, list)
        return {str(name): arrays[str(place)] for name, place in zip(names, places, strict=True)}

    def _trained_model(self, arrays: dict[str, Tensor]) -> Tensor:
        """Return the model of the training loss: theta, or the client's own where theta alone is none."""
        own = self._models(arrays) if self._algorithm.info.personal else {"global": arrays["theta"]}
        return arrays["theta"] if "global" in own else next(iter(own.values()))

    def _memory(self, task: Task) -> Any:
        """Return the memory after the last reply that the server used; a client that lost it starts with a new one."""
        found = self._kept.after(self._tags.used) if self._kept is not None else None
        if found is not None:
            return map_tensors(lambda t: t.to(self._device), found)
        self._forgot = self._kept is not None and self._tags.used != NEVER
        if (privacy := self._client.privacy) is not None and privacy.unit == "record":
            check_memory(self._algorithm, self._problem, task, privacy)
        return self._algorithm.init_memory(self._problem, task)

    def _task(self) -> Task:
        return row(self._tasks.stacked(ALONE, max(self._round, 0)), 0)

    def _check(self) -> None:
        """Refuse a server that runs something else."""
        mine = f"{self._algorithm!r}, {self._problem.n_parameters} parameters"
        theirs = f"{self._about['algorithm']!s}, {self._whole('n-parameters')} parameters"
        if mine != theirs:
            pairs = zip_longest(theirs.split(", "), mine.split(", "), fillvalue="nothing")
            differences = "; ".join(f"{a} there, {b} here" for a, b in pairs if a != b)
            raise ValueError(
                f"client {self._number} and the server must run the same, but differ in: {differences}. "
                "Give both the same method, settings and model."
            )

    def _arrays(self, name: str) -> Any:
        return self._content[name]

    def _whole(self, key: str) -> int:
        value = self._about[key]
        assert isinstance(value, int)
        return value

    @property
    def _device(self) -> torch.device:
        return self._problem.theta0.device


def _tag(value: Any) -> Tag:
    round, phase = value
    return int(round), int(phase)
