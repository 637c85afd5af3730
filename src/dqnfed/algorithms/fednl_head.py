"""FedNL-head: FedNL on the last linear layer, FedAvg on the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Info, ServerStep, Status, Theta, check_choice, check_range, check_used
from dqnfed.core.curvature import LOSS_PASSES, client_gradient
from dqnfed.core.heads import Head, head_features, head_hessians, last_layer
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.compressors import Code, Compressor, compressed, compressor, expanded, mean_expanded
from dqnfed.maths.symmetric import n_packed, packed, packed_norm, positive_solution, unpacked

FULL_UP_TO = 512  # head parameters; larger heads get one block per class


class FedNLHeadServer(NamedTuple):
    theta: Tensor  # [n]
    total: Tensor  # [B, T] sum of the estimates of all clients that took part so far, one triangle a block
    is_known: Tensor  # [C] bool, took part so far
    places: Tensor  # [B, d] int64 positions of the blocks in theta


class FedNLHeadMemory(NamedTuple):
    estimate: Tensor  # [B, T]
    n_rounds: Tensor  # [] in which it took part


class FedNLHeadUpdate(NamedTuple):
    delta: Tensor  # [n] local update of the body; the head's part is its gradient
    codes: Tensor  # [B, R (d + 1)] eigenpairs of the difference between Hessian and estimate
    base: Tensor  # [] a new client's estimate starts at this multiple of the identity; 0 from its second round on
    error: Tensor  # [] largest Frobenius norm of a block's difference


@dataclass(frozen=True, kw_only=True)
class FedNLHead(LocalWork[FedNLHeadServer, FedNLHeadMemory, FedNLHeadUpdate]):
    """FedNL on the last linear layer and FedAvg on the layers before it: an approximation for networks.

    Objective: the mean of the sampled clients' losses; cross-entropy on a linear last layer.

    Client: `epochs` of SGD for the body; for the head its gradient and Hessian at theta (positive semi-definite, and
    equal to Gauss-Newton), compressed as in FedNL to `rank` eigenpairs a block; moves its estimate by what it sent.

    Server: subtracts the mean local update from the body, and (H + l I)^-1 g from the head, H the mean estimate of all
    clients that took part so far and l the mean Frobenius error (FedNL's Option 2); the head's step is at most
    `max_step` long.

    State: client, the head's triangle (one per class with `blocks = "class"`); server, theta and as much.

    Payload: n + 2 + (blocks) rank (d + 1) floats up, n down, d the size of a block.

    Evaluation: the global model.

    Differences: Unlike the paper, only the head is second order, the clients are sampled, and a new client's estimate
    starts at the mean of its diagonal. Heads of more than 512 parameters use the diagonal blocks of the classes.

    Reference: after Safaryan et al., ICML 2022 (arXiv 2106.02969).

    Curvature: exact Hessian of the head (block-diagonal with `blocks = "class"`).
    """

    info: ClassVar[Info] = Info(
        server=FedNLHeadServer,
        memory=FedNLHeadMemory,
        replies=(FedNLHeadUpdate,),
        needs=("rows",),
        problem_kinds=frozenset({"network"}),
    )

    blocks: str = "auto"  # full | class | auto: full up to 512 head parameters
    rank: int = 1  # eigenpairs of each block that are sent, >= 1
    server_lr: float = 1.0  # of the body, > 0
    max_step: float = 1.0  # longest step of the head, > 0
    mu: float = 1e-2  # least curvature of the head, > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "blocks", ("auto", "full", "class"))
        check_range(self, "rank", low=1)
        for name in ("server_lr", "max_step", "mu"):
            check_range(self, name, low=0.0, open_low=True)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        head = last_layer(problem)
        check_used(self, "server_lr", used=head.start > 0, why="on a model that has no layers before its last one")
        blocks = self.blocks if self.blocks != "auto" else "full" if head.n_parameters <= FULL_UP_TO else "class"
        return replace(self, blocks=blocks)

    def how(self, problem: Problem) -> tuple[Head, int, Compressor]:
        """Return the head, the number of its blocks and their compressor."""
        head = last_layer(problem)
        is_full = self.blocks == "full" or (self.blocks == "auto" and head.n_parameters <= FULL_UP_TO)
        size = head.n_parameters if is_full else head.n_columns
        n_blocks = 1 if is_full else head.n_classes
        return head, n_blocks, compressor("rank", min(self.rank, size), size)

    def init_server(self, problem: Problem, n_clients: int) -> FedNLHeadServer:
        head, n_blocks, how = self.how(problem)
        total = problem.theta0.new_zeros(n_blocks, n_packed(how.d))
        places = head.places().reshape(n_blocks, how.d).to(problem.theta0.device)
        return FedNLHeadServer(problem.theta0.clone(), total, torch.zeros(n_clients).bool(), places)

    def init_memory(self, problem: Problem, task: Task) -> FedNLHeadMemory:
        _, n_blocks, how = self.how(problem)
        return FedNLHeadMemory(problem.theta0.new_zeros(n_blocks, n_packed(how.d)), problem.theta0.new_zeros(()))

    def client_step(
        self, problem: Problem, task: Task, sent: Theta, memory: FedNLHeadMemory
    ) -> tuple[FedNLHeadUpdate, FedNLHeadMemory]:
        head, n_blocks, how = self.how(problem)
        local = self.local_sgd(problem, task, sent.theta)
        gradient = client_gradient(problem, task, sent.theta)
        delta = torch.cat([(sent.theta - local)[: head.start], gradient[head.start :]])
        features = head_features(problem, task, sent.theta, head)
        outputs = problem.predict(sent.theta, task.inputs)
        hessians = head_hessians(features, outputs, task.mask, is_full=n_blocks == 1)
        triangles = torch.stack([packed(block) for block in hessians.unbind()])
        diagonal = torch.diagonal(hessians, dim1=-2, dim2=-1).mean() + problem.ridge
        base = torch.where(memory.n_rounds == 0, diagonal, torch.zeros_like(diagonal))
        estimate = memory.estimate + base * packed(torch.eye(how.d, dtype=local.dtype, device=local.device))
        differences = triangles - estimate
        codes = [compressed(how, difference, task.noise) for difference in differences.unbind()]
        moved = estimate + torch.stack([expanded(how, code) for code in codes])
        error = torch.stack([packed_norm(difference, how.d) for difference in differences.unbind()]).amax()
        update = FedNLHeadUpdate(delta, torch.stack([code.values for code in codes]), base, error)
        return update, FedNLHeadMemory(moved, memory.n_rounds + 1)

    def server_step(
        self, server: FedNLHeadServer, replies: Replies[FedNLHeadUpdate], cohort: Cohort
    ) -> ServerStep[FedNLHeadServer]:
        n_blocks, size = server.places.shape
        codes = replies.rows("codes")
        how = compressor("rank", codes.shape[2] // (size + 1), size)
        eye = torch.eye(size, dtype=server.theta.dtype, device=server.theta.device)
        none = codes.new_zeros(0, dtype=torch.int32)
        learnt = torch.stack([mean_expanded(how, Code(codes[:, b], none), 1) for b in range(n_blocks)])
        total = server.total + float(replies.scalars("base").sum()) * packed(eye) + learnt
        is_known = server.is_known.index_fill(0, cohort.clients.to(server.is_known.device), True)
        shift = float(replies.scalars("error").mean()) + self.mu
        mean = replies.mean("delta")
        steps = [
            positive_solution(unpacked(total[b] / is_known.sum(), size) + shift * eye, mean[server.places[b]])
            for b in range(n_blocks)
        ]
        step = torch.stack(steps)
        step = step * (self.max_step / step.norm().clamp(min=self.max_step))
        theta = (server.theta - self.server_lr * mean).index_put((server.places,), server.theta[server.places] - step)
        return ServerStep(FedNLHeadServer(theta, total, is_known, server.places), Status.NEXT, {"shift": shift})

    def passes(self, sent: Theta) -> float:
        return float(self.epochs) + 1.0 + 2.0 * LOSS_PASSES  # the head's gradient, its features and its outputs
