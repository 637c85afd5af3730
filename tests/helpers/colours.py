"""How far apart colours are for normal and colour-blind eyes, and how well they read."""

import re
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LINEAR_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
# Machado, Oliveira & Fernandes 2009, full severity
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}


def linear(colour: str) -> Floats:
    """Return the linear RGB of a colour written #rrggbb."""
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """Return the WCAG contrast ratio of two colours, 1 to 21."""
    dark, light = sorted(float(linear(c) @ LINEAR_TO_XYZ[1]) for c in (a, b))
    return (light + 0.05) / (dark + 0.05)


def smallest_distance(colours: list[str], vision: str) -> float:
    """Return the smallest CIE76 distance between any two of the colours as seen with the given vision."""
    seen = [_lab(np.clip(VISION[vision] @ linear(colour), 0, 1)) for colour in colours]
    return min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2))


def css_palettes(css: str) -> list[dict[str, str]]:
    """Return the custom properties that are colours of every rule that defines a paper colour."""
    rules = re.findall(r"\{([^{}]*--paper:[^{}]*)\}", css)
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", rule)) for rule in rules]
    return [{name: value if len(value) == 7 else _long(value) for name, value in rule.items()} for rule in found]


def _long(short: str) -> str:
    return "#" + "".join(2 * digit for digit in short[1:])


def _lab(rgb: Floats) -> Floats:
    x = LINEAR_TO_XYZ @ rgb / np.array([0.95047, 1.0, 1.08883])
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
