"""Damaged payloads of every codec: refused with a PayloadError, or decoded to the promised size.

    python fuzz/payloads.py --full --workers 2

`sealed` has right checksums, so that what is behind them is attacked; `unsealed` leaves them as
they are, and accepts no payload of version 2 that is not what was sent. The damage is that of
tests/compress/fuzz.py.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from runner import Target, main

from sn_compress import Payload, PayloadError
from sn_compress.codecs.base import mean_of_gathered


@cache
def _damages() -> Any:
    path = Path(__file__).resolve().parents[1] / "tests" / "compress" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("payload_damage", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def _targets() -> tuple[list[Any], list[bytes]]:
    damages = _damages()
    targets = damages.targets([*damages.codecs(), *damages.rivals()], np.random.default_rng(0))
    return targets, [data for _, _, seeds in targets for data in seeds]


def _case(seed: int, sealed: float) -> tuple[Any, list[Any], list[bytes], bytes]:
    rng = np.random.default_rng((seed, int(sealed)))
    targets, every = _targets()
    codec, payloads, seeds = targets[seed % len(targets)]
    if not sealed:  # version 1 has a sum, which is known to miss whole classes of damage
        seeds, every = ([d for d in some if d[2] != 1] for some in (seeds, every))
    data = _damages().damage(rng, every if rng.random() < 0.15 else seeds, sealed=sealed)
    return codec, payloads, every, data


def sealed(seed: int) -> str:
    """A payload with a right checksum: read, and decoded, alone or behind a sound one."""
    codec, payloads, _, data = _case(seed, 1.0)
    sound = payloads[seed % len(payloads)]
    try:
        # A size that depends on the data does not travel through collectives.
        if seed % 5 == 0 and getattr(codec, "form", "fixed") == "fixed":
            both = np.frombuffer(sound.to_bytes() + data, np.uint8)
            out, n = mean_of_gathered(codec, both, 2, sound.n), sound.n
        else:
            shift = seed % 3  # a peer's buffer may start at any address
            asked = sound.n if seed % 2 else None
            payload = Payload.from_bytes(memoryview(bytes(shift) + data)[shift:], n=asked)
            out, n = codec.decode(payload, n=asked), payload.n
    except PayloadError:
        return "PayloadError"
    if out.dtype != np.float32 or out.shape != (n,):
        raise AssertionError(f"decoded to {out.dtype} {out.shape}; expected float32 ({n},)")
    return "decoded"


def unsealed(seed: int) -> str:
    """A payload of which the checksum was left as it was: refused, or one that was sent."""
    _, _, every, data = _case(seed, 0.0)
    try:
        Payload.from_bytes(data)
    except PayloadError:
        return "PayloadError"
    if data not in every:
        raise AssertionError(f"taken although damaged: {data.hex()}")
    return "undamaged"


TARGETS = {"sealed": Target(sealed, full=1_000_000), "unsealed": Target(unsealed, full=100_000)}

if __name__ == "__main__":
    main(TARGETS)
