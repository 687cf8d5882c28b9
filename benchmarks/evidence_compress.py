"""Sections of evidence.py for sn_compress: payloads, and a tiny net trained with each seam.

    python -m benchmarks evidence freeze --out FOLDER --sections compress_closure compress_calls \
        compress_golden compress_payloads compress_seams

takes some six minutes. What has seconds in it is in scripts of their own, to be run for both trees
in turn on a machine with nothing else to do:

    python -m benchmarks ddp_step
    python -m benchmarks resnet50_step
    OMP_NUM_THREADS=1 python -m benchmarks hook_seconds --json FILE
    python -m benchmarks study --help      the rows of results/study_rerun.json
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evidence_ranks import GLOO, bits
from evidence_rules import modules, not_above, reported, same, same_numbers
from evidence_sections import Rows, Section

HERE = Path(__file__).resolve().parent
RANKS = HERE / "evidence_ranks.py"
LIMIT_S = 900.0
# What all ranks hold alike; by gossip each rank's bits are its own.
APART = ("gossip", "keras_gossip")
CODECS = (
    "fft", "dct", "hadamard", "lowrank", "topk", "qsgd", "terngrad", "dgc", "onebit", "powersgd",
    "bounded", "fp16", "bf16", "demo",
)  # fmt: skip


def _tree() -> Path:
    """The root of the tree that is measured."""
    spec = importlib.util.find_spec("sn_compress")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).resolve().parents[1]


# --- payloads


def _golden_units() -> tuple[Sequence[str], Sequence[str]]:
    return ["golden"], ["golden"]


def golden_rows(unit: str) -> Rows:
    """Payloads of tests/golden: what they decode to, and what is written in their place today."""
    from sn_compress import FFTCodec, Payload, codec

    folder = _tree() / "tests" / unit
    entries = json.loads((folder / "payloads.json").read_text("utf-8"))
    spec = importlib.util.spec_from_file_location("golden_make", folder / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    for name, entry in entries.items():
        data = (folder / f"{name}.bin").read_bytes()
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in entry["settings"].items()}
        kind = entry.get("codec")
        if kind and not _is_known(kind):
            continue
        instance = codec(kind, **plain) if kind else FFTCodec(**plain)
        bad = {int(at): float(value) for at, value in entry.get("non_finite", {}).items()}
        payload = instance.encode(make.vector(entry["n"], bad))
        yield {
            "key": name,
            "file": hashlib.sha256(data).hexdigest()[:16],
            "decoded": bits([instance.decode(Payload.from_bytes(data))]),
            "body": hashlib.sha256(payload.body.tobytes()).hexdigest()[:16],
        }


def _is_known(name: str) -> bool:
    """Whether there is a codec of this name. The rows of one that went are lost."""
    from sn_compress import CompressError, presets

    try:
        presets(name)
    except CompressError:
        return False
    return True


def _encoding_units() -> tuple[Sequence[str], Sequence[str]]:
    return CODECS, CODECS


def encoding_rows(unit: str) -> Rows:
    """Payloads of larger vectors by each codec of the registry, with its presets."""
    if not _is_known(unit):
        return
    from sn_compress import codec, presets

    rng = np.random.default_rng(0)
    noise = rng.standard_normal(100_000, dtype=np.float32)
    smooth = np.cumsum(rng.standard_normal(70_001, dtype=np.float32)) / np.float32(100)
    asked = {"lowrank": {"shape": (250, 400)}, "bounded": {"bound": 0.05}}.get(unit, {})
    settings: list[dict[str, Any]] = [
        asked,
        *(asked | {"preset": preset} for preset in presets(unit)),
    ]
    if unit == "fft":
        settings += [
            {"span": 64, "bits": 4, "mantissa": 1}, {"block": None}, {"positions": "bitmap"},
        ]  # fmt: skip
    if unit == "powersgd":
        settings.append({"shape": (250, 400), "rank": 4})
    for chosen in settings:
        for name, vector in (("noise", noise), ("smooth", smooth)):
            if "shape" in chosen and name == "smooth":
                continue
            instance = codec(unit, **chosen)
            payload = instance.encode(vector)
            decoded = instance.decode(payload)
            error = np.linalg.norm(decoded.astype(np.float64) - vector) / np.linalg.norm(vector)
            yield {
                "key": f"{unit} {chosen or ''} of {name}",
                "body": hashlib.sha256(payload.body.tobytes()).hexdigest()[:16],
                "decoded": bits([decoded]),
                "nbytes": payload.nbytes,
                "ratio": 4 * vector.size / payload.nbytes,
                "error": float(error),
            }


# --- trainings


def _seam_units() -> tuple[Sequence[str], Sequence[str]]:
    units = ["ddp 2", "ddp 3", "fsdp 2", "gossip 2"]
    if importlib.util.find_spec("horovod"):
        units += ["horovod 2", "horovod 3"]
        if importlib.util.find_spec("tensorflow"):
            units += ["tape 2", "keras 2", "keras_gossip 2"]
    return units, units


def seam_rows(unit: str) -> Rows:
    """A tiny net after 50 steps of each class: bits, what a report says, what was sent."""
    seam, ranks = unit.rsplit(" ", 1)
    by_rank = run_seam(seam, int(ranks))
    for rows in zip(*by_rank, strict=True):
        own = [row["bits"] for row in rows]
        extra = {"ranks_bits": own} if seam in APART else {"equal": len(set(own)) == 1}
        yield {**rows[0], **extra, "key": f"{unit}, {rows[0]['key']}"}


def run_seam(seam: str, ranks: int) -> list[list[dict[str, Any]]]:
    """The rows of each rank of a seam."""
    if seam in GLOO:
        from ddp_ranks import run_ranks

        by_rank = run_ranks(str(RANKS), {"seam": seam}, ranks=ranks, timeout_s=LIMIT_S)
        return [rank["rows"] for rank in by_rank]
    # Not fused: what is summed together, and so in which order, depends on when it came.
    env = os.environ | {"HOROVOD_FUSION_THRESHOLD": "0"}
    with tempfile.TemporaryDirectory() as folder:
        launch = [str(_tree() / "tests" / "launch.py"), "--gloo", "-np", str(ranks)]
        command = [sys.executable, *launch, sys.executable, str(RANKS), "--horovod", seam, folder]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        if run.returncode:
            raise RuntimeError(f"{seam}: {(run.stdout + run.stderr)[-3000:]}")
        files = [Path(folder) / f"rank{rank}.json" for rank in range(ranks)]
        return [json.loads(file.read_text("utf-8"))["rows"] for file in files]


def _two_ranks(seam: str) -> Callable[[str], Rows]:
    def rows(unit: str) -> Rows:
        yield from run_seam(seam, 2)[0]

    return rows


def _one_unit() -> tuple[Sequence[str], Sequence[str]]:
    return ["ddp"], ["ddp"]


COMPRESS_SECTIONS: dict[str, Section] = {
    "compress_closure": Section(
        "modules that DDP's hook imports", _one_unit, _two_ranks("closure"), (modules,),
        package="sn_compress",
    ),
    "compress_calls": Section(
        "calls from DDP's hook to arithmetic", _one_unit, _two_ranks("depth"),
        (not_above("depth"), reported("stack")), package="sn_compress",
    ),
    "compress_golden": Section(
        "golden payloads", _golden_units, golden_rows,
        (same("file"), same("decoded"), same("body")), package="sn_compress",
    ),
    "compress_payloads": Section(
        "payloads of larger vectors", _encoding_units, encoding_rows,
        (same("body"), same("decoded"), not_above("nbytes"), not_above("error", 1e-3)),
        package="sn_compress",
    ),
    "compress_seams": Section(
        "a tiny net after 50 steps", _seam_units, seam_rows,
        (
            same("bits"), same("ranks_bits"), same("equal"), same("consensus"),
            same_numbers("report"), not_above("sent_bytes"), not_above("collectives"),
        ),
        package="sn_compress",
    ),
}  # fmt: skip
