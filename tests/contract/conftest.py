"""Which contract tests a method is exempt from: those in its own `info.exemptions`, with the reason it gives there."""

import pytest

from dqnfed.algorithms import REGISTRY


@pytest.fixture(autouse=True)
def exempt(request: pytest.FixtureRequest) -> None:
    """Skip the test if the method named by its parameter declares an exemption from it."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    algorithm = REGISTRY.get(parameters.get("name", ""))
    reason = algorithm.info.exemptions.get(request.node.originalname) if algorithm is not None else None
    if reason is not None:
        pytest.skip(f"{parameters['name']} is exempt: {reason}")
