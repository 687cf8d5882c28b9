"""Published seconds of training steps on GPUs, and links of clusters.

What compression can gain hangs on one number: the seconds in which plain's bytes cross the link,
over the seconds of computing (rho). Taken from a paper's own speed-up it proves nothing. So both
sides are from publications that have nothing to do with compression.
"""

from __future__ import annotations

from dataclasses import dataclass

from sn_compress.prediction.cost import Link


@dataclass(frozen=True)
class Gpu:
    """What one GPU takes for a step of one model: forward and backward pass of `batch` images."""

    model: str
    images: int
    seconds: float
    precision: str
    source: str


_TENSORFLOW = "tensorflow.org, Benchmarks, DGX-1, synthetic ImageNet, May 2017"
_NVIDIA = "NVIDIA DeepLearningExamples, ResNet-50 v1.5 for TensorFlow 19.05, DGX-1"
_JOHNSON = "jcjohnson/cnn-benchmarks, Torch, cuDNN 5.1"
GPUS = {
    "titan-x": (
        Gpu("alexnet", 16, 14.56e-3, "fp32", _JOHNSON),
        Gpu("resnet50", 16, 103.58e-3, "fp32", _JOHNSON),
    ),
    "p100": (
        Gpu("alexnet", 512, 512 / 2987, "fp32", _TENSORFLOW),
        Gpu("resnet50", 64, 64 / 219, "fp32", _TENSORFLOW),
    ),
    "v100": (
        Gpu("alexnet", 512, 512 / 3861.48, "fp32", "tensorflow/benchmarks issue 359, TF 1.13"),
        Gpu("resnet50", 128, 128 / 364.9, "fp32", _NVIDIA),
    ),
    "v100-mixed": (Gpu("resnet50", 256, 256 / 802.1, "mixed", _NVIDIA),),
}
"""Name -> its steps. Of AlexNet in mixed precision we know no publication."""


@dataclass(frozen=True)
class Wire:
    """A link of a cluster; the rate is that of data, after the line code.

    Latencies are the model's own for Ethernet (TCP) and a round 5 us for InfiniBand: of exchanges
    as large as these they are less than a millisecond a collective.
    """

    name: str
    gbit: float
    latency_s: float

    def link(self) -> Link:
        """As the model of costs has it."""
        return Link.of_gbit(self.gbit, latency_s=self.latency_s)


WIRES = {
    "1gbe": Wire("1 GbE", 1.0, 50e-6),
    "10gbe": Wire("10 GbE", 10.0, 50e-6),
    "25gbe": Wire("25 GbE", 25.0, 50e-6),
    # Four lanes of 14.0625 and of 25.78125 Gbit/s, 64 bits in 66: InfiniBand FDR and EDR.
    "fdr": Wire("FDR InfiniBand", 4 * 14.0625 * 64 / 66, 5e-6),
    "edr": Wire("EDR InfiniBand", 4 * 25.78125 * 64 / 66, 5e-6),
}


def step_on(gpu: str, model: str) -> Gpu | None:
    """The published step of a model on a GPU; None where there is none."""
    return next((step for step in GPUS[gpu] if step.model == model), None)
