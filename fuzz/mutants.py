"""Damage to texts and to JSON, by a random generator: what the scripts of this folder share."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

TOKENS = (
    "NaN", "Infinity", "-1", "1e999", "1e-400", "9" * 30, "9" * 5000, "1.5", "null", "true", "{}",
    "[]", '""', "[" * 40, "[" * 2000, '{"a":' * 2000, "\0", "\\u0000", "\\ud800", "\\", '"', "é",
    ",", "\n", "\r", "\ufeff", "'", "x" * 200_000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53 + 1, 2**61, 2**62 - 1, 2**62, 2**63 - 1, 2**63,
    2**64, 10**30, -(2**63), 10**400, 0.0, -0.0, 0.5, 1e-320, 1e-300, 1e18, 5e18, 1e300, 1.7e308,
    float("nan"), float("inf"), -1.5, "", "x", "run", "free", "\0", "\ud800", "compress s2",
    "a" * 1000, [], {}, [[]], [1, 2], {"a": 1},
)  # fmt: skip


def pick(rng: np.random.Generator, items: Any) -> Any:
    """Return one of the items."""
    return items[int(rng.integers(len(items)))]


def damaged_text(rng: np.random.Generator, text: str) -> bytes:
    """Return the text with one to three bytes, pieces or tokens changed."""
    data = bytearray(text.encode())
    for _ in range(int(rng.integers(1, 4))):
        at, end = sorted(int(place) for place in rng.integers(0, len(data) + 1, 2))
        end = min(end, at + int(rng.integers(1, 40)))
        kind = rng.integers(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            del data[at:end]
        elif kind == 2:
            data[at:at] = data[at:end]
        elif kind == 3 and rng.random() < 0.1:
            del data[at:]
        elif kind == 4 and at < len(data):
            data[at] = int(pick(rng, list(b'0123456789-.,eE[]{}":\n')))
        else:
            data[at : end if rng.random() < 0.5 else at] = pick(rng, TOKENS).encode(
                errors="surrogatepass"
            )
    return bytes(data)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value in a JSON structure."""
    places, left = [], [data]
    while left:
        here = left.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here))
        for key in keys:
            places.append((here, key))
            if isinstance(here[key], dict | list):
                left.append(here[key])
    return places


def damaged_json(rng: np.random.Generator, text: str) -> str:
    """Return JSON text in which one to three values are changed, moved, left out or doubled."""
    data = json.loads(text)
    for _ in range(int(rng.integers(1, 4))):
        spots = places(data)
        if not spots:
            break
        container, key = pick(rng, spots)
        kind = rng.integers(7)
        if kind == 0:
            # A copy: what is put in is changed by the next damage.
            container[key] = copy.deepcopy(pick(rng, VALUES))
        elif kind == 1:
            del container[key]
        elif kind == 2:
            other, name = pick(rng, spots)
            container[key] = copy.deepcopy(other[name])
        elif kind == 3 and isinstance(container, list):
            container.insert(int(rng.integers(len(container) + 1)), copy.deepcopy(container[key]))
        elif kind == 4 and isinstance(container, list):
            other = int(rng.integers(len(container)))
            container[key], container[other] = container[other], container[key]
        elif kind == 5 and isinstance(container[key], int | float) and abs(container[key]) < 1e300:
            container[key] = container[key] * pick(rng, (0, 2, 0.5, -1, 10**6, 1.0000001))
        else:
            number = container[key]
            if isinstance(number, int) and not isinstance(number, bool):
                container[key] = number + pick(rng, (-1, 1, 2))
            elif isinstance(container, dict):
                container[pick(rng, ("x", "name", "bytes", "keep", "seconds"))] = copy.deepcopy(
                    pick(rng, VALUES)
                )
    return json.dumps(data)
