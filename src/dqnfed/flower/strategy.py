"""The server's side on Flower: the simulator's engine, whose clients are behind messages."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm, refuse_reference
from dqnfed.core.expected import Layout, expected_reply, layout_of, own_model_names
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.result import RunResult
from dqnfed.core.runners import vectorised
from dqnfed.core.screening import Policy, check_min_replies, prepared_with
from dqnfed.core.tensors import stack
from dqnfed.flower import checks
from dqnfed.flower.checks import Question
from dqnfed.flower.client_memory import NEVER, Receipt, Tag, Tags
from dqnfed.flower.evaluations import Evaluations, refusal
from dqnfed.flower.exchange import OFFLINE, first_line, messages_to, mismatched, received
from dqnfed.flower.lock import sole_writer
from dqnfed.flower.records import array_record, encoded, named_arrays
from dqnfed.flower.results import RoundLog, flower_result
from dqnfed.flower.roster import Member, Roster, changed_sizes
from dqnfed.flower.run_files import kept_key, members_before, write_claims
from dqnfed.flower.secure_records import read_words
from dqnfed.flower.secure_server import Hashed, SecureServer
from dqnfed.secure.methods import secure_method
from dqnfed.secure.noise import Privacy
from dqnfed.secure.pads import evaluation_of, message_of
from dqnfed.secure.sums import n_wholes
from dqnfed.sim.accelerate import acceleration
from dqnfed.sim.checkpoint import checkpoint_rounds
from dqnfed.sim.claims import checked_share, few_clients
from dqnfed.sim.clients import Answers, Evaluated, SumQuestion, Sums, Validated
from dqnfed.sim.engine import run_loop
from dqnfed.sim.observers import Observer
from dqnfed.sim.private import check_privacy
from dqnfed.sim.sampling import Sampling, as_sampling
from dqnfed.sim.setup import cohort_size, plain_config
from dqnfed.sim.state import Evaluation, Setup, State
from dqnfed.sim.sums import squared_numbers
from dqnfed.sim.tasks import TaskBuilder

logger = logging.getLogger("dqnfed")
flower_log = logging.getLogger("flwr")  # what `flwr run --stream` shows
POLL_SECONDS = 1.0  # between two looks at who is online
SETTLING_SECONDS = 10.0  # without a new node after which those that are there are asked which clients they are
ASK_AGAIN_SECONDS = 30.0  # after which those that did not reply are asked again


class Strategy(FlowerStrategy):
    """Any registered method on Flower, with the simulator's engine, screening, run folder and checkpoints.

    Cohorts, batches and noise are drawn as in the simulator, so that the same seed gives the same model. Give `out`
    to keep everything on disk as it happens; with `resume`, a run that was killed goes on after its last finished
    round. `result` is the `RunResult` once `start` has returned.
    """

    memory_kind: type[Any] | None = Receipt

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        problem: Problem,
        *,
        n_clients: int,
        participation: float = 1.0,  # share of the clients sampled each round, in (0, 1]
        sampling: Sampling | str = "uniform",  # how they are drawn
        seed: int = 0,
        evaluation: Evaluation | None = None,
        policy: Policy | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        wait: float = 600.0,  # seconds for all clients to come online before the first round
        files: Mapping[str, str] | None = None,  # further texts for the run's folder, by name
        config: Mapping[str, Any] | None = None,  # as written to config.toml
        observers: Iterable[Observer] = (),
        secure: bool = False,  # replies under one-time pads: see `dqnfed.secure`
        privacy: Privacy | None = None,  # the noise of its clients, which is counted here against its budget
    ) -> None:
        refuse_reference(algorithm, "on Flower")
        self.result: RunResult | None = None
        self._problem, self._seed, self._participation = problem, seed, participation
        self._policy, self._evaluation = policy or Policy(), evaluation or Evaluation()
        if self._policy.on_worse is None and privacy is None:  # clients elsewhere are not known to be honest
            self._policy = replace(self._policy, on_worse="best")  # by losses, which no budget of noise counts
        self._sampling, self._drawn_size = as_sampling(sampling), cohort_size(participation, n_clients)
        self._sampling.check(n_clients, self._drawn_size)
        self._cohort_size = self._sampling.expected_size(n_clients, participation)
        check_min_replies(self._policy, self._cohort_size)  # before clients are waited for
        self._faster = acceleration()
        if secure:
            algorithm = secure_method(algorithm, self._policy, problem, n_clients, self._cohort_size)
        self._algorithm = prepared_with(algorithm, self._policy, problem, n_clients, self._cohort_size)
        self._fingerprint = repr(algorithm.prepare(problem, n_clients, self._cohort_size))  # what clients must run too
        self._privacy = privacy
        self._out = None if out is None else Path(out)
        self._resume = resume and self._out is not None and bool(checkpoint_rounds(self._out))
        self._wait, self._config, self._observers = wait, config, tuple(observers)
        self._roster = Roster(n_clients)
        self._files = dict(files or {})
        self._key = uuid.uuid4().hex  # under which clients keep their memories of this run
        self._clients: list[int] = []  # asked in the present exchange
        self._used: dict[int, Tag] = {}  # every client's last reply that was used
        self._kept: dict[int, Tag] = {}  # the same, when the best model so far was evaluated
        self._sent: list[Message] = []
        self._phase: Tag = NEVER
        self._answers: Answers | None = None
        self._expected: dict[str, Layout | None] = {}  # replies by the layout of the message
        self._expects: Layout | None = None  # the reply to the present message
        self._evaluations = Evaluations()
        self._faults: set[str] = set()  # why nodes did not report which client they are
        self._secure = SecureServer(self._algorithm, problem, self._ask) if secure else None
        self._sums_only = secure and self._evaluation.metrics == "aggregate-only"
        self._grid: Grid

    @property
    def out(self) -> Path | None:
        """The run folder."""
        return self._out

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train for the given number of rounds; `timeout` replaces that of the policy."""
        if train_config or evaluate_config or evaluate_fn:
            raise ValueError(
                "train_config, evaluate_config and evaluate_fn have no meaning here: a method's settings are its "
                "fields, and clients evaluate as `evaluation` says; leave them out."
            )
        if timeout is not None:
            self._policy = replace(self._policy, timeout=timeout)
        if initial_arrays is not None:
            parameters = named_arrays(initial_arrays)
            theta0 = torch.cat([parameters[name].reshape(-1) for name, _ in self._problem.layout])
            self._problem = replace(self._problem, theta0=theta0.to(self._problem.theta0))
        self._grid = grid
        self.summary()
        if self._out is None:
            return self._train(num_rounds)
        with sole_writer(self._out):  # a server app outlives a killed SuperLink, and may come back to life
            return self._train(num_rounds)

    def _train(self, num_rounds: int) -> Result:
        if self._out is not None:
            self._key = kept_key(self._out, self._key, resume=self._resume)
        setup = self._setup(self._wait_for_clients(), num_rounds)
        check_privacy(setup)
        settings = dict(self._config) if self._config is not None else plain_config(setup, self._participation)
        self.result = run_loop(
            setup,
            settings,
            out=self._out,
            checkpoint_seconds=0.0,  # a round over the network costs more than to write down what the server keeps
            observers=[RoundLog(), *self._observers],
            resume=self._resume,
            faster=self._faster,
        )
        return flower_result(self.result)

    def summary(self) -> None:
        """Log what will run."""
        flower_log.info("dqnfed: %r", self._algorithm)
        flower_log.info(
            "dqnfed: %d clients, %d a round; %d parameters; %r",
            self._roster.n_clients,
            self._cohort_size,
            self._problem.n_parameters,
            self._policy,
        )
        flower_log.info("dqnfed: %s", few_clients(checked_share(self._policy), self._cohort_size))

    # What the engine asks for: `dqnfed.sim.clients.Clients`.

    def train(self, setup: Setup, state: State, clients: Tensor, sent: Any, phase: int) -> Answers:
        """Return the clients' replies to what was sent in this phase of the round."""
        self._address(clients, state)
        self._phase = (state.round, phase)
        self._expects = self._reply_to(sent)
        about = ConfigRecord({"kind": type(sent).__name__, "round": state.round, "phase": phase})
        messages = self.configure_train(state.round + 1, encoded(sent), about, self._grid)
        if self._secure is not None:
            hashed = partial(message_of, self._key, state.round, phase, sent)
            messages = self._under_pads(messages, hashed, self._about(about))
        self.aggregate_train(state.round + 1, self._exchanged(messages))
        assert self._answers is not None
        return self._answers

    @property
    def is_secure(self) -> bool:
        """Whether replies reach the server under pads alone."""
        return self._secure is not None

    def evaluate(self, setup: Setup, state: State, clients: Tensor, *, with_scores: bool) -> Evaluated:
        """Return the clients' training losses at the present model, and their scores."""
        if (
            state.round >= 0 or not self._evaluations.reports
        ):  # clients evaluate the start model when they are identified
            self._ask_to_evaluate(clients, state, setup.evaluation.part, with_scores=with_scores)
        return self._evaluations.evaluated(self.model_names(setup) if with_scores else [])

    def validate(self, setup: Setup, state: State) -> Validated:
        """Return the losses and scores of the present primary model on the validation examples of those who reply."""
        self._ask_to_evaluate(setup.evaluated, state, "validation", with_scores=True, with_loss=False)
        return self._evaluations.validated()

    def sums(self, setup: Setup, state: State, question: SumQuestion) -> Sums | None:
        """Return sums of what the clients measure at the present model; nobody's own numbers reach the server."""
        assert self._secure is not None
        self._address(question.clients, state)
        arrays, about = self._models(state.server, state.round, question.part, with_scores=True)
        about["sums"] = list(question.names)
        messages = self.configure_evaluate(state.round + 1, arrays, about, self._grid)
        hashed = partial(evaluation_of, self._key, state.round, question.names, named_arrays(arrays))
        contents, faults = self._by_client(self._exchanged(self._under_pads(messages, hashed, self._about(about))))
        n, found = n_wholes(squared_numbers(question.names, len(setup.model_names))), {}
        for client, content in contents.items():
            try:
                if change := changed_sizes(checks.read_member(content), self._roster.members[client]):
                    raise checks.Refused(change)
                found[client] = read_words(checks.record(content, "padded", ArrayRecord), n)
            except Exception as error:  # as above
                faults[client] = refusal(error)
        self._evaluations.note_silent(faults, state.round)
        return self._secure.sums(setup, question, found)

    def _ask_to_evaluate(
        self, clients: Tensor, state: State, part: str, *, with_scores: bool, with_loss: bool = True
    ) -> None:
        self._address(clients, state)
        arrays, about = self._models(state.server, state.round, part, with_scores=with_scores, with_loss=with_loss)
        messages = self.configure_evaluate(state.round + 1, arrays, about, self._grid)
        self.aggregate_evaluate(state.round + 1, self._exchanged(messages))

    def model_names(self, setup: Setup | None) -> list[str]:
        """Return the names of the models that the method evaluates, the primary one first; clients have no say."""
        return own_model_names(self._algorithm, self._problem, self._roster.n_clients)

    def refusals(self) -> list[dict[str, Any]]:
        """Return the evaluations and nodes that were refused since the last call, and why."""
        return self._evaluations.new_refusals()

    # What Flower asks for: the methods of a strategy.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message for every client asked whose node is online."""
        return messages_to(self._nodes(grid), MessageType.TRAIN, "sent", arrays, self._about(config))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Read the replies, sorted by client; the engine passes them to the method."""
        contents, faults = self._by_client(replies)
        updates: dict[int, Any] = {}
        releases: dict[int, int] = {}
        for client, content in contents.items():
            try:
                updates[client] = self._read(content)
                about = checks.record(content, "about", ConfigRecord)
                forgot, releases[client] = bool(about.get("forgot")), checks.read_releases(about)
            except Exception as error:  # whatever a client sends, the run goes on without it
                faults[client] = refusal(error)
                continue
            if forgot:
                logger.warning("round %d: client %d lost its memory and starts with a new one", self._phase[0], client)
        faults.update({} if self._secure is not None else mismatched(updates))
        kept = [client for client in sorted(updates) if client not in faults]
        self._answers = Answers(
            torch.tensor(kept, dtype=torch.long),
            self._replies({client: updates[client] for client in kept}) if kept else None,
            Receipt(*(torch.full((len(kept),), number) for number in self._phase)),
            sorted(faults.items()),
            None if self._secure is None else self._secure.traffic,
            max([releases[client] for client in kept], default=1),
        )
        return None, MetricRecord({"replies": len(kept), "missing": len(faults)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message for every client asked whose node is online."""
        return messages_to(self._nodes(grid), MessageType.EVALUATE, "models", arrays, self._about(config))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Read what the clients measured; those without a usable reply are silent."""
        contents, faults = self._by_client(replies)
        self._evaluations.reports = {}
        for client, content in contents.items():
            try:
                if change := changed_sizes(checks.read_member(content), self._roster.members[client]):
                    raise checks.Refused(change)
                self._evaluations.enter(client, content, self._problem)
            except Exception as error:  # as above
                faults[client] = refusal(error)
        faults |= self._evaluations.drop_far_off()
        self._evaluations.note_silent(faults, server_round - 1)
        return MetricRecord({"replies": len(self._evaluations.reports), "silent": len(faults)})

    def _read(self, content: Any) -> Any:
        if self._secure is not None:
            return self._secure.read(content, self._expects)
        return checks.read_update(content, self._algorithm.info.replies, self._expects, self._problem)

    def _replies(self, updates: Mapping[int, Any]) -> Any:
        if self._secure is not None and self._expects is not None:
            return self._secure.replies(updates, self._expects)
        return self._faster.replies(stack([updates[client] for client in sorted(updates)]))

    def _under_pads(self, messages: Iterable[Message], hashed: Hashed, about: ConfigRecord) -> list[Message]:
        """Return the messages with what clients need to pad their replies; they have a common key by then."""
        assert self._secure is not None
        online = set(self._grid.get_node_ids())
        client_of = {node: client for client, node in self._roster.node_of.items() if node in online}
        self._secure.share_key(self._key, list(client_of.values()), about)
        return self._secure.address(messages, client_of, hashed, about)

    def _ask(self, contents: Mapping[int, RecordDict]) -> tuple[dict[int, Any], dict[int, str]]:
        """Return what clients answer to questions of their own, and why others do not."""
        online = set(self._grid.get_node_ids())
        nodes = {client: self._roster.node_of.get(client, 0) for client in contents}
        faults = {client: OFFLINE for client, node in nodes.items() if node not in online}
        messages = []
        for client, content in contents.items():
            if client not in faults:
                tags = {"used": list(self._used.get(client, NEVER)), "kept": list(self._kept.get(client, NEVER))}
                about: Any = content["about"]
                whole = RecordDict({**content, "about": ConfigRecord({**about, **tags})})
                messages.append(Message(whole, nodes[client], MessageType.QUERY))
        if not messages:
            return {}, faults
        found = received(messages, self._grid.send_and_receive(messages, timeout=self._policy.timeout))
        client_of = {node: client for client, node in nodes.items()}
        faults |= {client_of[node]: why for node, why in found.faults.items()}
        return {client_of[node]: content for node, content in found.contents.items()}, faults

    # Who is asked, and how.

    def _address(self, clients: Tensor, state: State) -> None:
        """Set the clients of the next exchange; nodes that came back under another id are identified first."""
        store = state.memory
        self._used, self._kept = _tags_of(store.named()), _tags_of(state.kept)
        for phase_clients, receipts in store.staged:
            tags = zip(receipts.round.tolist(), receipts.phase.tolist(), strict=True)
            self._used.update(zip(phase_clients.tolist(), tags, strict=True))
        self._identify(state.server, state.round)
        self._clients = clients.tolist()

    def _nodes(self, grid: Grid) -> dict[int, Tags]:
        """Return the online nodes of the clients asked, with the replies after which their memories count."""
        online = set(grid.get_node_ids())
        places = {client: self._roster.node_of.get(client) for client in self._clients}
        return {
            node: Tags(self._used.get(client, NEVER), self._kept.get(client, NEVER))
            for client, node in places.items()
            if node is not None and node in online
        }

    def _exchanged(self, messages: Iterable[Message]) -> Iterable[Message]:
        self._sent = list(messages)
        return self._grid.send_and_receive(self._sent, timeout=self._policy.timeout) if self._sent else []

    def _by_client(self, replies: Iterable[Message]) -> tuple[dict[int, Any], dict[int, str]]:
        found = received(self._sent, replies)
        contents: dict[int, Any] = {}
        faults: dict[int, str] = {}
        for client in self._clients:
            node = self._roster.node_of.get(client, 0)
            if node in found.contents:
                contents[client] = found.contents[node]
            elif node == 0 and self._roster.refused:
                faults[client] = f"its node was refused: {first_line('; '.join(self._roster.refused.values()))}"
            else:
                faults[client] = found.faults.get(node, OFFLINE)
        return contents, faults

    def _reply_to(self, sent: Any) -> Layout | None:
        """Return what a reply to this message must look like, by the server's own model and method."""
        key = repr(layout_of(sent))
        if key not in self._expected:
            self._expected[key] = expected_reply(self._algorithm, self._problem, sent)
        return self._expected[key]

    def _about(self, config: ConfigRecord) -> ConfigRecord:
        """Return what every message says: which run, which method, which seed."""
        return ConfigRecord(
            {
                "run": self._key,
                "algorithm": self._fingerprint,
                "n-parameters": self._problem.n_parameters,
                "n-clients": self._roster.n_clients,
                "cohort-size": self._cohort_size,
                "seed": self._seed,
                **({"rate-bounds": self._policy.rate_bounds or 0.0} if self._secure is not None else {}),
                **config,
            }
        )

    def _models(
        self, server: Any, round: int, part: str, *, with_scores: bool, with_loss: bool = True
    ) -> tuple[ArrayRecord, ConfigRecord]:
        """Return the models that clients are to evaluate, each sent once, and what they are called."""
        tensors = {"theta": server.theta}
        places: dict[str, str] = {}
        if with_scores and not self._algorithm.info.personal:
            for name, theta in self._algorithm.models(server, None).items():
                places[name] = "theta" if theta is server.theta else f"model {name}"
                tensors[places[name]] = theta
        names = self.model_names(None) if with_scores and self._algorithm.info.personal else list(places)
        self._evaluations.question = Question(names, with_loss)
        about: dict[str, Any] = {"round": round, "phase": 0, "part": part}
        about |= {"with-scores": with_scores, "with-loss": with_loss}
        return array_record(tensors), ConfigRecord({**about, "models": list(places), "places": list(places.values())})

    # Before the first round.

    def _wait_for_clients(self) -> Federation:
        """Return who the clients are, when all are online; a run that goes on knows them from its folder."""
        server = self._algorithm.init_server(self._problem, self._roster.n_clients)
        if self._resume and self._out is not None:
            self._roster.members.update(members_before(self._out))
        end = time.monotonic() + self._wait
        seen, due = set[int](), -math.inf  # who was online at the last look; when they are asked which client they are
        while len(missing := self._roster.missing()) > len(self._roster.refused):
            online, now = set(self._grid.get_node_ids()), time.monotonic()
            if online != seen or due < 0:
                all_here = len(self._roster.unidentified(online)) >= len(missing)
                seen, due = online, now if all_here else now + SETTLING_SECONDS  # all at once, if possible
                flower_log.info("dqnfed: %d nodes are online; waiting for clients %s", len(online), missing)
            if now >= min(due, end):
                self._identify(server, -1, with_scores=True)
                due = time.monotonic() + ASK_AGAIN_SECONDS
                if now >= end:
                    break
            else:
                time.sleep(POLL_SECONDS)
        return self._federation()

    def _federation(self) -> Federation:
        """Return the clients that were met, with sizes that are held; a client whose node was refused has no say."""
        members, refused = self._roster.members, self._roster.refused
        absent = [client for client in range(self._roster.n_clients) if client not in members]
        if len(absent) > len(refused) or not self._roster.node_of:
            self._faults |= set(refused.values())
            reasons = f" Nodes that were asked: {'; '.join(sorted(self._faults))}." if self._faults else ""
            raise TimeoutError(
                f"clients {absent or 'of any number'} did not come within {self._wait:g} s; every client must be "
                "online before the first round, and at least one when a run goes on. Start their nodes, or wait longer "
                f"with `wait`.{reasons}"
            )
        for client in absent:
            logger.warning("the run begins without client %d: %s", client, "; ".join(refused.values()))
        nobody = {client: Member(client, f"client {client}", "", 1, 1, 1) for client in absent}
        ordered = [(members | nobody)[client] for client in range(self._roster.n_clients)]
        return Federation.elsewhere(
            self._held_sizes(ordered),
            [member.n_test for member in ordered],
            n_validation=None if 0 in (counts := [member.n_validation for member in ordered]) else counts,
            names=_distinct_names(ordered),
            groups=[member.group for member in ordered] if all(member.group for member in ordered) else (),
        )

    def _held_sizes(self, members: list[Member]) -> list[int]:
        """Return the numbers of training examples as weights; a claim far above the others' is held."""
        claimed, ratio = [member.n_train for member in members], self._policy.max_size_ratio
        held = checks.held_sizes(claimed, ratio)
        for client, (claim, weight) in enumerate(zip(claimed, held, strict=True)):
            if weight < claim:
                why = (
                    f"it claims {claim} training examples, more than {ratio:g} times the median; its weight is {weight}"
                )
                logger.warning("client %d is held: %s", client, why)
                self._evaluations.refuse(why, client=client)
        if self._out is not None:
            write_claims(self._out, self._key, claimed)
        return held

    def _identify(self, server: Any, round: int, *, with_scores: bool = False) -> None:
        """Ask nodes that may be missing clients which they are; at the start they evaluate the model at once."""
        online = set(self._grid.get_node_ids())
        nodes = dict.fromkeys(self._roster.unidentified(online), Tags())
        if not nodes:
            return
        with_scores = with_scores and not self._sums_only
        with_loss = not self._sums_only
        arrays, config = self._models(
            server, round, self._evaluation.part, with_scores=with_scores, with_loss=with_loss
        )
        messages = messages_to(nodes, MessageType.EVALUATE, "models", arrays, self._about(config))
        found = received(messages, self._grid.send_and_receive(messages, timeout=self._policy.timeout))
        for node, why in found.faults.items():
            logger.warning("node %d does not report which client it is, %s", node, why)
            self._faults.add(why)
        for node, content in sorted(found.contents.items()):
            self._meet(node, content, online, with_scores=with_scores)
        if with_scores:
            for client, why in sorted(self._evaluations.drop_far_off().items()):
                self._evaluations.refuse(why, client=client)

    def _meet(self, node: int, content: Any, online: set[int], *, with_scores: bool) -> None:
        """Enter the client that a node reports to be, or refuse the node; a bad evaluation alone costs no client."""
        try:
            member = checks.read_member(content)
            objection = self._roster.objection(node, member, online)
        except Exception as error:  # whatever an unknown node sends
            objection = f"node {node} does not report which client it is: {first_line(error)}"
        if objection:
            if self._policy.on_missing == "fail":
                raise ValueError(objection)
            logger.warning("node %d is refused: %s", node, objection)
            self._roster.refuse(node, objection)
            self._evaluations.refuse(objection, node=node)
            return
        self._roster.enter(node, member)
        if not with_scores:
            return
        try:
            self._evaluations.enter(member.client, content, self._problem)
        except Exception as error:  # as above
            why = refusal(error)
            logger.warning("evaluation of the start: client %d is silent, %s", member.client, why)
            self._evaluations.refuse(why, client=member.client)

    def _setup(self, federation: Federation, rounds: int) -> Setup:
        problem = self._faster.problem(self._problem)
        return Setup(
            self._algorithm,
            problem,
            federation,
            rounds,
            self._drawn_size,
            self._seed,
            vectorised(),
            self._evaluation,
            self._policy,
            TaskBuilder(federation, problem, self._algorithm, self._seed),
            clients=self,
            replies=self._faster.replies,
            privacy=self._privacy,
            files=self._files,
            participation=self._participation,
            sampling=self._sampling,
        )


def _tags_of(named: Mapping[str, Tensor]) -> dict[int, Tag]:
    """Return which reply of every client the named tensors of a store of receipts are about."""
    if "memory.round" not in named:
        return {}
    tags = list(zip(named["memory.round"].tolist(), named["memory.phase"].tolist(), strict=True))
    return {client: tags[row] for client, row in enumerate(named["memory_row_of"].tolist()) if row >= 0}


def _distinct_names(members: list[Member]) -> list[str]:
    """Return the clients' names, or their numbers if two have the same name."""
    names = [member.name for member in members]
    return names if len(set(names)) == len(names) else [str(member.client) for member in members]
