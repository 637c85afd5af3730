"""The same rounds in FedJAX; the models are written in plain JAX."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

if not hasattr(jax, "tree_map"):  # FedJAX was written before JAX moved it
    jax.tree_map = jax.tree_util.tree_map

import fedjax
from workloads import LEARNING_RATE, WORKLOADS, Pulse, examples

PLACES = ("NCHW", "OIHW", "NCHW")


def start(name: str) -> dict[str, jax.Array]:
    shapes = {"W1": [(3072, 200), (200, 100), (100, 10)], "W2": [(32, 1, 5, 5), (64, 32, 5, 5), (3136, 512), (512, 62)]}
    generator = np.random.default_rng(0)
    found = {}
    for k, shape in enumerate(shapes[name]):
        fan_in = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
        found[f"w{k}"] = jnp.asarray(generator.normal(size=shape, scale=fan_in**-0.5), jnp.float32)
        found[f"b{k}"] = jnp.zeros(shape[0] if len(shape) == 4 else shape[1])
    return found


def pooled(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def outputs(name: str, p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    if name == "W1":
        x = jax.nn.relu(x @ p["w0"] + p["b0"])
        return jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    for k in range(2):
        x = jax.lax.conv_general_dilated(x, p[f"w{k}"], (1, 1), "SAME", dimension_numbers=PLACES)
        x = pooled(jax.nn.relu(x + p[f"b{k}"][:, None, None]))
    return jax.nn.relu(x.reshape(len(x), -1) @ p["w2"] + p["b2"]) @ p["w3"] + p["b3"]


def main(name: str) -> None:
    pulse, workload = Pulse(), WORKLOADS[name]
    inputs, labels = examples(workload)
    clients = {f"{c:03d}".encode(): {"x": inputs[c], "y": labels[c]} for c in range(workload.n_clients)}
    federated = fedjax.InMemoryFederatedData(clients)

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array], rng: object) -> jax.Array:
        scores = jax.nn.log_softmax(outputs(name, params, batch["x"]))
        return -jnp.mean(jnp.take_along_axis(scores, batch["y"][:, None], axis=1))

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(LEARNING_RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch_size, num_epochs=1),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(federated, num_clients=workload.cohort, seed=0)
    state = algorithm.init(start(name))

    def play(round: int) -> None:
        nonlocal state
        sampler.set_round_num(round)
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)

    pulse.serve(play)


main(sys.argv[1])
