"""Models: sizes as published, no running statistics, and the same result one client at a time or all at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dqnfed.models import MODELS, Normalise, build
from dqnfed.models.resnet50 import BATCH_NORM_EPS, FrozenNorm

IMAGE = {"mean": [0.49, 0.48, 0.45], "std": [0.25, 0.24, 0.26]}

# name, input shape, outputs, settings: small enough for a second on one core
SMALL: list[tuple[str, tuple[int, ...], int, dict[str, Any]]] = [
    ("linear", (12,), 3, {}),
    ("mlp", (3, 4, 4), 3, {"hidden": [7, 5], **IMAGE}),
    ("mlp", (12,), 3, {"hidden": [7], "activation": "tanh"}),
    ("cnn", (3, 8, 8), 4, {"channels": [4, 6], "hidden": 8, **IMAGE}),
    ("resnet18", (3, 16, 16), 5, {"width": 4, **IMAGE}),
    ("resnet18", (3, 16, 16), 5, {"width": 4, "stem": "tinyimagenet", **IMAGE}),
    ("resnet18", (3, 32, 32), 5, {"width": 4, "stem": "imagenet", **IMAGE}),
    ("resnet50", (3, 32, 32), 5, {"width": 4, "blocks": [1, 1, 1, 1], **IMAGE}),
    ("lstm", (9,), 11, {"vocabulary": 11, "embedding": 3, "hidden": 6, "layers": 1}),
    ("lstm", (9,), 11, {"vocabulary": 11, "embedding": 3, "hidden": 6, "layers": 2}),
]
NAMES = [f"{name}-{i}" for i, (name, *_) in enumerate(SMALL)]


def n_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def example_inputs(name: str, shape: tuple[int, ...], settings: Mapping[str, Any], n: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if name == "lstm":
        return torch.randint(settings["vocabulary"], (n, *shape), generator=generator, dtype=torch.uint8)
    if "mean" in settings:
        return torch.randint(256, (n, *shape), generator=generator, dtype=torch.uint8)
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "shape", "n_outputs", "settings", "published"),
    [
        ("linear", (1, 28, 28), 3, {}, 2_355),  # q-FFL's Fashion-MNIST model
        ("mlp", (3, 32, 32), 10, {}, 656_810),  # CIFAR-10 setup 1
        ("mlp", (64,), 10, {"hidden": [32]}, 64 * 32 + 32 + 32 * 10 + 10),
        ("cnn", (1, 28, 28), 62, {}, 222_078),  # Ditto's FEMNIST model
        ("cnn", (1, 28, 28), 62, {"channels": [32, 64], "hidden": 2048}, 6_603_710),  # LEAF's
        # FairMOO's: 64 * 76 + 64 * 1601 + 384 * 1601 + 192 * 385 + 10 * 193
        ("cnn", (3, 32, 32), 10, {"channels": [64, 64], "hidden": [384, 192], "padded": False}, 797_962),
        ("resnet18", (3, 32, 32), 10, {"stem": "imagenet"}, 11_181_642),
        ("resnet18", (3, 32, 32), 10, {}, 11_181_642 - (7 * 7 - 3 * 3) * 3 * 64),
        ("lstm", (80,), 80, {}, 817_872),  # one bias a gate
        ("lstm", (80,), 80, {"layers": 1}, 817_872 - (4 * 512 * 256 + 4 * 256)),
    ],
)
def test_parameter_counts_are_the_published_ones(
    name: str, shape: tuple[int, ...], n_outputs: int, settings: dict[str, Any], published: int
) -> None:
    assert n_parameters(build(name, input_shape=shape, n_outputs=n_outputs, settings=settings)) == published


def test_resnet50_has_the_published_size_less_its_normalisation() -> None:
    model = build("resnet50", input_shape=(3, 224, 224), n_outputs=1000, settings={})
    norms = sum(m.scale.numel() for m in model.modules() if isinstance(m, FrozenNorm))
    assert norms == 26_560  # the channels of ResNet-50's 53 BatchNorm layers
    assert n_parameters(model) + 2 * norms == 25_557_032


@pytest.mark.parametrize(("name", "shape", "n_outputs", "settings"), SMALL, ids=NAMES)
def test_every_client_at_once_equals_one_client_at_a_time(
    name: str, shape: tuple[int, ...], n_outputs: int, settings: dict[str, Any]
) -> None:
    """Per-client gradients under vmap, with one set of weights a client, equal a plain backward pass each."""
    n_clients, n = 3, 4
    models = [
        build(name, input_shape=shape, n_outputs=n_outputs, settings=settings, seed=s).double()
        for s in range(n_clients)
    ]
    inputs = torch.stack([example_inputs(name, shape, settings, n).roll(s, 0) for s in range(n_clients)])
    targets = torch.randint(n_outputs, (n_clients, n), generator=torch.Generator().manual_seed(0))
    stacked = {
        key: torch.stack([dict(m.named_parameters())[key].detach() for m in models])
        for key, _ in models[0].named_parameters()
    }

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(models[0], parameters, (x,)), y)

    found = vmap(grad(loss))(stacked, inputs, targets)
    for k, model in enumerate(models):
        nn.functional.cross_entropy(model(inputs[k]), targets[k]).backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            size = parameter.grad.abs().max()
            assert size > 0, f"{key} gets no gradient"
            # GroupNorm over a handful of values divides by as little as sqrt(1e-5), block after block
            assert (found[key][k] - parameter.grad).abs().max() <= 1e-8 * size


@pytest.mark.parametrize(("name", "shape", "n_outputs", "settings"), SMALL, ids=NAMES)
def test_nothing_changes_in_training_mode(
    name: str, shape: tuple[int, ...], n_outputs: int, settings: dict[str, Any]
) -> None:
    model = build(name, input_shape=shape, n_outputs=n_outputs, settings=settings)
    inputs = example_inputs(name, shape, settings, 3)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    before = {key: value.clone() for key, value in model.named_buffers()}
    assert torch.equal(model.train()(inputs), model.eval()(inputs))
    assert all(torch.equal(before[key], value) for key, value in model.named_buffers())
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_weights_come_from_the_seed_alone(name: str) -> None:
    _, shape, n_outputs, settings = next(row for row in SMALL if row[0] == name)
    state = torch.random.get_rng_state()
    first, again, other = (
        nn.utils.parameters_to_vector(
            build(name, input_shape=shape, n_outputs=n_outputs, settings=settings, seed=s).parameters()
        )
        for s in (5, 5, 6)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_lstm_layers_equal_torchs_own() -> None:
    ours = build("lstm", input_shape=(7,), n_outputs=5, settings={"vocabulary": 5, "hidden": 6, "layers": 2}).double()
    theirs = nn.LSTM(8, 6, num_layers=2, batch_first=True).double()
    state = dict(ours.named_parameters())
    with torch.no_grad():
        for i in range(2):
            from_input, from_state = state[f"layers.{i}.weight"].split([8 if i == 0 else 6, 6], dim=1)
            getattr(theirs, f"weight_ih_l{i}").copy_(from_input)
            getattr(theirs, f"weight_hh_l{i}").copy_(from_state)
            getattr(theirs, f"bias_ih_l{i}").copy_(state[f"layers.{i}.bias"])
            getattr(theirs, f"bias_hh_l{i}").zero_()
    text = torch.randint(5, (4, 7), generator=torch.Generator().manual_seed(0))
    embedded = nn.functional.embedding(text, state["embedding.weight"])
    expected = theirs(embedded)[0][:, -1] @ state["output.weight"].T + state["output.bias"]
    torch.testing.assert_close(ours(text), expected, rtol=1e-12, atol=1e-12)


def test_normalise_makes_zero_mean_and_unit_variance_of_bytes() -> None:
    images = torch.randint(256, (50, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scaled = images.double() / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3), correction=0)
    layer = Normalise(mean.tolist(), std.tolist()).double()
    found = layer(images)
    # mean and std went through float32, hence 1e-6
    torch.testing.assert_close(found.mean((0, 2, 3)), torch.zeros(3).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.std((0, 2, 3), correction=0), torch.ones(3).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(layer(scaled), found)


def test_group_norm_uses_the_documented_groups() -> None:
    for width, groups in [(4, {2, 4, 8, 16}), (64, {32})]:
        model = build("resnet18", input_shape=(3, 8, 8), n_outputs=2, settings={"width": width})
        assert {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)} == groups
    legacy = build("resnet18", input_shape=(3, 8, 8), n_outputs=2, settings={"width": 4, "groups": 2})
    assert {m.num_groups for m in legacy.modules() if isinstance(m, nn.GroupNorm)} == {2}


def test_double_softmax_bounds_the_loss() -> None:
    """Cross entropy of probabilities lies in [ln(e + 9) - 1, ln(e + 9)] for ten classes: why the FedFV records learn
    slowly.
    """
    model = build("linear", input_shape=(6,), n_outputs=10, settings={"double_softmax": True})
    outputs = model(1e3 * torch.randn(200, 6, generator=torch.Generator().manual_seed(0)))
    losses = nn.functional.cross_entropy(outputs, torch.arange(200) % 10, reduction="none")
    highest = torch.log(torch.tensor(torch.e + 9))
    assert losses.max() <= highest + 1e-5
    assert losses.min() >= highest - 1 - 1e-5


def published_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a state dict as torchvision would save it, with random BatchNorm statistics, for the convolutions of
    `model`.
    """
    generator = torch.Generator().manual_seed(1)
    state = {name: value.clone() for name, value in model.state_dict().items() if not name.endswith(("scale", "shift"))}
    for name, module in model.named_modules():
        if isinstance(module, FrozenNorm):
            n = module.scale.numel()
            state[f"{name}.weight"] = torch.rand(n, generator=generator) + 0.5
            state[f"{name}.bias"] = torch.randn(n, generator=generator)
            state[f"{name}.running_mean"] = torch.randn(n, generator=generator)
            state[f"{name}.running_var"] = torch.rand(n, generator=generator) + 0.1
            state[f"{name}.num_batches_tracked"] = torch.tensor(7)
    return state


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_resnet50_takes_published_weights_and_freezes_their_statistics(tmp_path: Path, suffix: str) -> None:
    small: dict[str, Any] = {"width": 4, "blocks": [1, 2, 1, 1]}
    donor = build("resnet50", input_shape=(3, 32, 32), n_outputs=1000, settings=small, seed=1)
    state, path = published_state(donor), tmp_path / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    model = build("resnet50", input_shape=(3, 32, 32), n_outputs=14, settings={**small, "weights": str(path)}, seed=2)
    assert torch.equal(dict(model.named_parameters())["layer2.1.conv2.weight"], state["layer2.1.conv2.weight"])
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(4))
    oracle = nn.BatchNorm2d(4, eps=BATCH_NORM_EPS).eval()
    oracle.load_state_dict({key.removeprefix("bn1."): state[key] for key in state if key.startswith("bn1.")})
    torch.testing.assert_close(model.get_submodule("bn1")(x), oracle(x), rtol=1e-5, atol=1e-5)


def test_resnet50_refuses_weights_of_another_network(tmp_path: Path) -> None:
    save_file({"encoder.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="do not fit ResNet-50"):
        build(
            "resnet50",
            input_shape=(3, 32, 32),
            n_outputs=2,
            settings={"width": 4, "weights": str(tmp_path / "other.safetensors")},
        )
    with pytest.raises(FileNotFoundError, match=r"leave model\.weights out"):
        build("resnet50", input_shape=(3, 32, 32), n_outputs=2, settings={"width": 4, "weights": "nowhere.pth"})


@pytest.mark.parametrize(
    ("name", "shape", "settings", "message"),
    [
        ("mlpp", (4,), {}, "did you mean 'mlp'"),
        ("mlp", (4,), {"hiden": [3]}, "did you mean 'hidden'"),
        ("mlp", (4,), {"hidden": []}, "at least one positive width"),
        ("mlp", (4,), {"activation": "sine"}, "activation must be one of relu, tanh"),
        ("cnn", (4,), {}, "use 'mlp'"),
        ("cnn", (1, 3, 3), {}, "at least 4x4"),
        ("cnn", (1, 15, 20), {"padded": False}, "at least 16x16"),
        ("resnet18", (3, 8, 8), {"stem": "vgg"}, "stem must be"),
        ("resnet18", (3, 8, 8), {"width": 4, "groups": 3}, "do not divide"),
        ("lstm", (1, 8, 8), {}, "windows of character codes"),
        ("mlp", (3, 4, 4), {"mean": [0.5], "std": [0.0]}, "std must be positive"),
        ("mlp", (3, 4, 4), {"mean": [0.5], "std": [0.1, 0.2]}, "one value a channel"),
    ],
)
def test_wrong_settings_get_an_answer(
    name: str, shape: tuple[int, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, input_shape=shape, n_outputs=2, settings=settings)
