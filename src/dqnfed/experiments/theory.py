"""The paper's theorems as executable checks: what each assumes, what comes out, and whether it holds as stated.

A check is a small deterministic experiment with the paper's own update (`gram_schmidt_step`, or its equal,
`rate_matching_step`). Where a statement fails for it, a second row shows the counter-example, and the page on the
theorems says why. Theorem numbers are those of Hamidi & Ye, TMLR 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dqnfed.maths.directions import gram_schmidt_step, rate_matching_step
from dqnfed.maths.step_length import paper_length_is_safe

DTYPE = torch.float64
LOOKS = (10, 100, 1000)  # rounds at which a sequence is looked at
VANISHED = 0.05  # share of its first value below which a sequence counts as going to zero


@dataclass(frozen=True)
class Finding:
    """One row of `dqnfed theory`."""

    theorem: str
    assumption: str
    measured: str
    holds: bool
    is_expected_to_hold: bool

    @property
    def as_documented(self) -> bool:
        return self.holds == self.is_expected_to_hold


@dataclass(frozen=True)
class Quadratic:
    """f(theta) = (theta - centre)' H (theta - centre) / 2, a client whose Newton decrement is known exactly."""

    H: Tensor  # [n, n]
    centre: Tensor  # [n]

    def loss(self, theta: Tensor) -> Tensor:
        away = theta - self.centre
        return torch.dot(away, self.H @ away).mul(0.5)

    def gradient(self, theta: Tensor) -> Tensor:
        return torch.mv(self.H, theta - self.centre)

    def rate(self, theta: Tensor) -> Tensor:
        """Return g'H^-1 g, the rate that the paper wants its BFGS matrices to give."""
        slope = self.gradient(theta)
        return torch.dot(slope, torch.linalg.solve(self.H, slope))


def check_theorems() -> list[Finding]:
    """Return one finding or more for every theorem of the paper."""
    checks: Sequence[Callable[[], list[Finding]]] = (
        rate_alignment,
        sufficient_decrease,
        vanishing_direction_sgd,
        vanishing_direction_local_epochs,
        pseudo_gradient_lemma,
        pareto_convergence,
        newton_rate,
        own_rate,
    )
    return [finding for check in checks for finding in check()]


def text_table(findings: Sequence[Finding]) -> str:
    """Return the findings as text, one paragraph each; a surprise is marked."""
    lines = []
    for finding in findings:
        verdict = "holds" if finding.holds else "fails"
        surprise = "" if finding.as_documented else "   (NOT as documented)"
        lines.append(f"{finding.theorem}: {verdict}{surprise}")
        lines.append(f"  assumes   {finding.assumption}")
        lines.append(f"  measured  {finding.measured}")
    return "\n".join(lines)


def random_quadratics(n_clients: int, n: int, *, condition: float, spread: float, seed: int) -> list[Quadratic]:
    """Return clients with curvatures from 1 / condition to 1 and centres `spread` apart; 0: all the same."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for _ in range(n_clients):
        Q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=DTYPE)).Q
        H = (Q * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n, dtype=DTYPE)) @ Q.T
        clients.append(Quadratic((H + H.T) / 2, spread * torch.randn(n, generator=generator, dtype=DTYPE)))
    return clients


def rows_and_rates(clients: Sequence[Quadratic], theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clients' gradients [K, n] and exact Newton decrements [K]."""
    return torch.stack([c.gradient(theta) for c in clients]), torch.stack([c.rate(theta) for c in clients])


def paper_step(clients: Sequence[Quadratic], theta: Tensor) -> Tensor:
    """Return the paper's whole step, eta times its direction."""
    return rate_matching_step(*rows_and_rates(clients, theta)).step


def rate_alignment() -> list[Finding]:
    """Theorem 4.1: along the direction every loss falls at a rate proportional to d_k; after eta, at d_k itself."""
    worst, worst_scaled = 0.0, 0.0
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        G = torch.randn(6, 20, generator=generator, dtype=DTYPE)
        d = torch.rand(6, generator=generator, dtype=DTYPE) + 0.1
        found = gram_schmidt_step(G, d)
        ratios = (G @ found.direction) / d
        worst = max(worst, float(ratios.max() / ratios.min()) - 1.0)
        worst_scaled = max(worst_scaled, float(((G @ found.step - d) / d).abs().max()))
    g = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=DTYPE)
    d = torch.tensor([2.0, 2.0], dtype=DTYPE)  # the second scaled denominator is d_2 - d_1 = 0
    literal, solved = gram_schmidt_step(g, d).step, rate_matching_step(g, d)
    return [
        Finding(
            "Theorem 4.1, rate alignment",
            "independent gradients, non-zero denominators in the scaled Gram-Schmidt",
            f"50 random problems: g_k.direction / d_k equal to {worst:.0e}, g_k.step = d_k to {worst_scaled:.0e}",
            worst < 1e-8 and worst_scaled < 1e-8,
            True,
        ),
        Finding(
            "Theorem 4.1 as an algorithm",
            "independent gradients only (d_2 = d_1 (g_1.g_2) / |g_1|^2)",
            f"a denominator is zero: literal step {literal.tolist()}, minimum-norm step {solved.step.tolist()}",
            bool(torch.isfinite(literal).all()),
            False,
        ),
    ]


def sufficient_decrease() -> list[Finding]:
    """Theorem 4.2: no loss rises if eta <= (2 / L) min d_k; the prescribed eta does not see to it."""
    n_safe, n_rises_when_safe, n_rises = 0, 0, 0
    for seed in range(200):
        clients = random_quadratics(3, 10, condition=5.0 if seed % 2 else 100.0, spread=0.02, seed=seed)
        theta = torch.ones(10, dtype=DTYPE)
        G, d = rows_and_rates(clients, theta)
        step = rate_matching_step(G, d).step
        rises = any(float(c.loss(theta - step)) > float(c.loss(theta)) for c in clients)
        is_safe = paper_length_is_safe(d.numpy(), float(step @ step), smoothness=1.0)
        n_safe, n_rises = n_safe + is_safe, n_rises + rises
        n_rises_when_safe += is_safe and rises
    valley = Quadratic(torch.diag(torch.tensor([1.0, 100.0], dtype=DTYPE)), torch.zeros(2, dtype=DTYPE))
    theta = torch.tensor([1.0, 0.01], dtype=DTYPE)
    after = theta - paper_step([valley], theta)
    return [
        Finding(
            "Theorem 4.2, no loss rises",
            "L-smooth losses and eta <= (2 / L) min d_k",
            f"{n_safe} of 200 problems meet the condition; a loss rises in {n_rises_when_safe} of these",
            n_safe > 20 and n_rises_when_safe == 0,
            True,
        ),
        Finding(
            "Theorem 4.2 with the prescribed eta",
            "L-smooth losses, eta = sum 1 / |g~_k|^2 as Algorithm 1 says",
            f"H = diag(1, 100), theta = (1, 0.01), one client, exact Hessian: loss {float(valley.loss(theta)):.3f} -> "
            f"{float(valley.loss(after)):.3f}; some loss rises in {n_rises} of the 200 problems",
            n_rises == 0 and float(valley.loss(after)) <= float(valley.loss(theta)),
            False,
        ),
    ]


def vanishing_direction_sgd() -> list[Finding]:
    """Theorem 4.3: min over rounds of ||direction|| goes to 0 with diminishing steps and noise that dies out."""
    apart = smallest_norms(random_quadratics(2, 3, condition=3.0, spread=1.0, seed=2), noise=0.1)
    shared = smallest_norms(random_quadratics(2, 3, condition=3.0, spread=0.0, seed=2), noise=0.0)
    return [
        Finding(
            "Theorem 4.3, E = 1, SGD",
            "eta_t = 1 / (2 L sqrt(t + 1)), gradient noise 0.1 / (t + 1), clients with different minimisers",
            f"smallest |direction| after {_listed(LOOKS)} rounds: {_listed(apart)}",
            apart[-1] < VANISHED * apart[0],
            True,
        ),
        Finding(
            "Theorem 4.3 where clients share a minimiser",
            "the same steps without noise, clients with one common minimiser",
            f"smallest |direction|: {_listed(shared)}; direction = u / |u|^2 grows as theta nears the minimiser and u "
            "vanishes (the proof needs g_k.direction >= |direction|^2, that is d_k >= 1)",
            shared[-1] < VANISHED * shared[0],
            False,
        ),
    ]


def smallest_norms(clients: Sequence[Quadratic], *, noise: float = 0.0, epochs: int = 1) -> list[float]:
    """Return the smallest ||direction|| so far, at the rounds of LOOKS, of eta_t = 1 / (2 L sqrt(t + 1)) with L = 1."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.full_like(clients[0].centre, 2.0)
    smallest, found = float("inf"), []
    for t in range(LOOKS[-1]):
        _, d = rows_and_rates(clients, theta)
        lr = 0.5 / (t + 1) ** 0.5
        G = torch.stack([literal_pseudo_gradient(c, theta, epochs=epochs, lr=lr) for c in clients])
        noisy = G + noise / (t + 1) * torch.randn(G.shape, generator=generator, dtype=DTYPE)
        step = rate_matching_step(noisy, d).step
        squared = float(step @ step)
        smallest = min(smallest, squared**-0.5)
        theta = theta - 0.5 / (t + 1) ** 0.5 * step / squared
        if t + 1 in LOOKS:
            found.append(smallest)
    return found


def vanishing_direction_local_epochs() -> list[Finding]:
    """Theorem 4.4: the same with E local gradient steps whose rate goes to 0 too."""
    found = smallest_norms(random_quadratics(2, 3, condition=3.0, spread=1.0, seed=2), epochs=3)
    return [
        Finding(
            "Theorem 4.4, E = 3, GD",
            "eta_t = 1 / (2 L sqrt(t + 1)), local rate 1 / (2 sqrt(t + 1)), clients with different minimisers",
            f"smallest |direction| after {_listed(LOOKS)} rounds: {_listed(found)}",
            found[-1] < VANISHED * found[0],
            True,
        )
    ]


def literal_pseudo_gradient(client: Quadratic, theta: Tensor, *, epochs: int, lr: float) -> Tensor:
    """Return theta - theta_E as the proof of Lemma B.3 expands it: the whole gradient, plus lr times the later ones."""
    total = client.gradient(theta)
    local = theta - lr * total
    for _ in range(epochs - 1):
        slope = client.gradient(local)
        total, local = total + lr * slope, local - lr * slope
    return total


def pseudo_gradient_lemma() -> list[Finding]:
    """Lemma B.3: ||g_(k,E) - g_k|| <= eta E l."""
    client = random_quadratics(1, 5, condition=10.0, spread=0.0, seed=3)[0]
    theta = torch.ones(5, dtype=DTYPE)
    bound_l = float(client.gradient(theta).norm())  # gradients only shrink along the local path
    excess, plain = 0.0, []
    for lr in (0.5, 0.1, 0.01, 0.001):
        difference = literal_pseudo_gradient(client, theta, epochs=5, lr=lr) - client.gradient(theta)
        excess = max(excess, float(difference.norm()) - lr * 5 * bound_l)
        local = theta.clone()
        for _ in range(5):
            local = local - lr * client.gradient(local)
        plain.append(float(((theta - local) - client.gradient(theta)).norm()) / bound_l)
    return [
        Finding(
            "Lemma B.3, pseudo-gradients",
            "l-Lipschitz loss; the update vector is the gradient plus lr times the later ones, as the proof expands it",
            f"E = 5, lr from 0.5 to 0.001: |g_E - g| - lr E l is at most {excess:.1e}",
            excess <= 1e-12,
            True,
        ),
        Finding(
            "Lemma B.3 for theta - theta_E itself",
            "the same with one local rate for every step, as local GD has",
            f"|(theta - theta_E) - g| / |g| for lr = 0.5, 0.1, 0.01, 0.001: {_listed(plain)}; it goes to 1, not to 0 "
            "(the update vector must be divided by lr E)",
            plain[-1] <= 0.001 * 5,
            False,
        ),
    ]


def pareto_convergence() -> list[Finding]:
    """Theorem 4.5: theta approaches the Pareto set; but its two assumptions exclude each other on all of R^n."""
    clients = two_bowls()
    radius = [1.0, 10.0, 100.0, 1000.0]
    steepness = [float(clients[0].gradient(torch.tensor([r, 0.0], dtype=DTYPE)).norm()) for r in radius]
    theta = torch.tensor([0.3, 1.0], dtype=DTYPE)
    distances = [two_bowls_distance(theta)]
    for t in range(LOOKS[-1]):
        G, d = rows_and_rates(clients, theta)
        found = rate_matching_step(G, d)
        squared = float(found.step @ found.step)
        if float(found.residual) < 1e-6 * float(d.max()):  # else on the Pareto set, where no step gives all their rate
            theta = theta - 0.5 / (t + 1) ** 0.6 * found.step / squared
        if t + 1 in LOOKS:
            distances.append(two_bowls_distance(theta))
    first = torch.tensor([0.3, 1.0], dtype=DTYPE)
    second = first - paper_step(clients, first)
    third = second - paper_step(clients, second)
    return [
        Finding(
            "Theorem 4.5, assumptions",
            "every f_k both l-Lipschitz and strongly convex on R^n",
            f"|gradient| of a strongly convex loss at distance 1, 10, 100, 1000: {_listed(steepness)}; it passes every "
            "l, so no function meets both (on a ball they can)",
            max(steepness) <= 10.0 * min(steepness),
            False,
        ),
        Finding(
            "Theorem 4.5 on a ball",
            "two strongly convex quadratics, Lipschitz on the ball that theta stays in, eta_t = (t + 1)^-0.6 / 2",
            f"distance to the Pareto set at the start and after {_listed(LOOKS)} rounds: {_listed(distances)}",
            distances[-1] < VANISHED * distances[0],
            True,
        ),
        Finding(
            "Theorem 4.5 with the prescribed eta",
            "the same two clients, exact Hessians, eta = sum 1 / |g~_k|^2",
            f"(0.3, 1) -> ({second[0]:.6f}, {second[1]:.6f}) -> ({third[0]:.6f}, {third[1]:.6f}): a 2-cycle, for ever",
            bool((third - first).norm() > 1e-9),
            False,
        ),
    ]


def two_bowls() -> list[Quadratic]:
    """Return the two clients whose literal iteration is an exact 2-cycle."""
    return [
        Quadratic(torch.eye(2, dtype=DTYPE), torch.tensor([-1.0, 0.0], dtype=DTYPE)),
        Quadratic(torch.diag(torch.tensor([1.0, 3.0], dtype=DTYPE)), torch.tensor([1.0, 0.0], dtype=DTYPE)),
    ]


def two_bowls_distance(theta: Tensor) -> float:
    """Return the distance to their Pareto set, the segment between the centres (-1, 0) and (1, 0)."""
    nearest = torch.stack([theta[0].clamp(-1.0, 1.0), torch.zeros_like(theta[1])])
    return float((theta - nearest).norm())


def newton_rate() -> list[Finding]:
    """Theorem 4.6 and its corollaries for the iteration that their proof is about, theta - B^-1 g."""
    client = random_quadratics(1, 10, condition=4.0, spread=0.0, seed=5)[0]
    worst = 0.0
    counts = []
    for delta in (0.2, 0.1, 0.05):
        theta, n_rounds = torch.ones(10, dtype=DTYPE), 0
        inverse = torch.linalg.inv(client.H)
        generator = torch.Generator().manual_seed(7)
        while float(theta.norm()) > 1e-10:
            E = torch.randn(10, 10, generator=generator, dtype=DTYPE)
            E = E * (delta * torch.linalg.matrix_norm(inverse, 2) / torch.linalg.matrix_norm(E, 2))
            moved = theta - (inverse + E) @ client.gradient(theta)
            worst = max(worst, float(moved.norm() / theta.norm()) / (4.0 * delta))
            theta, n_rounds = moved, n_rounds + 1
        allowed = torch.log(torch.tensor(2.0 * 10**0.5 / 1e-10)) / torch.log(torch.tensor(1.0 / (4.0 * delta)))
        counts.append((n_rounds, float(allowed)))
    return [
        Finding(
            "Theorem 4.6 and Corollary 2, Newton-type iteration",
            "strongly convex quadratic, |B^-1 - H^-1| <= delta |H^-1|, step theta - B^-1 g with unit length",
            f"contraction is at most {worst:.2f} times L delta / lambda; rounds to 1e-10 against the bound: "
            + ", ".join(f"{n} <= {bound:.0f}" for n, bound in counts),
            worst <= 1.0 + 1e-9 and all(n <= bound + 1 for n, bound in counts),
            True,
        )
    ]


def own_rate() -> list[Finding]:
    """Theorem 4.6 and Corollary 1 for the update of Algorithm 1, with exact curvature (delta = 0)."""
    single = contraction(random_quadratics(1, 10, condition=100.0, spread=0.0, seed=2))
    several = contraction(random_quadratics(5, 50, condition=100.0, spread=0.0, seed=2))
    start = torch.full((10,), 2.0, dtype=DTYPE)
    apart = random_quadratics(3, 10, condition=10.0, spread=0.3, seed=4)
    theta = start
    mean_H = sum((c.H for c in apart), torch.zeros(10, 10, dtype=DTYPE))
    optimum = torch.linalg.solve(mean_H, sum((c.H @ c.centre for c in apart), torch.zeros(10, dtype=DTYPE)))
    for _ in range(100):
        theta = theta - paper_step(apart, theta)
    ended = float((theta - optimum).norm() / (start - optimum).norm())
    return [
        Finding(
            "Theorem 4.6 and Corollary 1 for Algorithm 1 itself",
            "one client, or 5 clients that share a minimiser; strongly convex quadratics, exact Hessians (delta = 0)",
            f"error per round, mean over 50: {single:.2f} (1 client, n = 10), {several:.2f} (5 clients, n = 50): "
            "linear, where the theorem says quadratic (here: one round)",
            max(single, several) < 1e-6,
            False,
        ),
        Finding(
            "Theorem 4.6 for clients that differ",
            "3 quadratics with different minimisers, exact Hessians, prescribed eta",
            f"distance to the minimiser of the mean loss after 100 rounds, over the start's: {ended:.2g}",
            ended < 1e-3,
            False,
        ),
    ]


def contraction(clients: Sequence[Quadratic], *, rounds: int = 50) -> float:
    """Return the mean factor by which the distance to the common minimiser shrinks in a round of the paper's step."""
    start = torch.ones_like(clients[0].centre)
    theta = start
    for _ in range(rounds):
        theta = theta - paper_step(clients, theta)
    return float((theta.norm() / start.norm()) ** (1.0 / rounds))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2g}" if value < 100 else f"{value:.0f}" for value in values)
