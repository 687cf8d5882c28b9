"""The simulator: what it says of the schemes is what theory says, and the command line runs."""

import json

import numpy as np
import pytest

from sn_cli.main import main
from sn_compress.errors import CompressError
from sn_compress.gossip import topology
from sn_compress.gossip.simulate import SCHEMES, Curve, simulate


@pytest.fixture(scope="module")
def curves():
    found = simulate(topology("dissemination", 16), steps=800, n=50)
    return {curve.scheme: curve for curve in found}


@pytest.mark.slow
def test_the_mean_model_descends_as_with_all_reduce(curves):
    """On a quadratic the mean of the gradients is the gradient of the mean, and mixing keeps it."""
    expected = np.array(curves["all-reduce"].mean_loss)
    for scheme in SCHEMES:
        # Rounding of 800 steps, of values of at most a few units.
        assert abs(np.array(curves[scheme].mean_loss) - expected).max() < 1e-10, scheme


def test_a_curve_has_settled_in_its_last_quarter():
    curve = Curve("any", (), tuple(range(8)), (), ())
    assert curve.settled("distance") == 6.5
    assert curve.growth() == 6.5 / 4.5


def test_weights_stay_together_and_gradients_drift(curves):
    assert curves["all-reduce"].settled("distance") < 1e-12
    for scheme in ("weights", "overlapped"):
        assert 0.8 < curves[scheme].growth() < 1.25  # flat; half a percent of noise a point
    for scheme in ("gradients", "alone"):
        assert curves[scheme].growth() > 1.02
        assert curves[scheme].settled("distance") > 5 * curves["weights"].settled("distance")
    assert curves["weights"].settled("distance") < curves["overlapped"].settled("distance")


def test_a_worker_of_an_exact_topology_without_noise_is_the_mean():
    for curve in simulate(topology("exact", 6), steps=20, n=5, noise=0):
        assert max(curve.distance) < 1e-12
        np.testing.assert_allclose(curve.worker_loss, curve.mean_loss, rtol=1e-12)


def test_the_command_draws_and_writes(tmp_path, capsys):
    png = tmp_path / "curves.png"
    flags = ["compress", "gossip", "--ranks", "6", "--topology", "exact", "--steps", "30"]
    assert main([*flags, "--png", str(png)]) == 0
    out, err = capsys.readouterr()
    assert "6 ranks, exact (4 steps a period, exact)" in out
    assert all(scheme in out for scheme in SCHEMES)
    assert "steps 30 of 30 (100%" in err
    assert main([*flags, "--quiet", "--json"]) == 0
    out, err = capsys.readouterr()
    assert not err
    rows = json.loads(out)["curves"]
    assert [row["scheme"] for row in rows] == list(SCHEMES)
    assert len(rows[0]["steps"]) == len(rows[0]["distance"]) == 30
    assert png.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_simulated_is_said(capsys):
    assert main(["compress", "gossip", "--ranks", "6", "--topology", "hypercube"]) == 2
    assert "power of two" in capsys.readouterr().err
    with pytest.raises(CompressError, match="up to 1024"):
        simulate(topology("ring", 1025))
    for flag in ("--rate", "--noise", "--momentum"):
        for value in ("nan", "inf", "-1"):
            assert main(["compress", "gossip", "--ranks", "4", f"{flag}={value}", "--steps=8"]) == 2
            assert f"{flag[2:]}: got {float(value)}, expected" in capsys.readouterr().err
