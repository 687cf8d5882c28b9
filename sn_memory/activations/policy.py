"""What each kind of op needs of what it saved, as a table.

Unbiased errors are harmless where the backward pass is linear in what was saved (inputs of
matrix products and convolutions: arXiv 2605.01255), and nowhere else. A ReLU asks for signs only,
a dropout for its mask, a pooling layer for indices and a shape: these are kept exactly.
"""

from __future__ import annotations

from typing import Final, Literal

Treatment = Literal["linear", "sign", "mask", "shape", "nonlinear", "exact"]
"""How what an op saved is kept.

linear      lossy and unbiased, at the bits the controller chooses
sign        whether it is above zero: 1 bit
mask        which of two values: 1 bit, if it does hold two, else as "nonlinear"
shape       nothing but its shape and type
nonlinear   lossy and unbiased, at 8 bits unless a budget says otherwise
exact       as it is
"""

_TABLE: Final[dict[Treatment, str]] = {
    "linear": "linear conv1d conv2d conv3d matmul mm bmm addmm baddbmm einsum",
    "sign": "relu relu_ leaky_relu leaky_relu_",
    "mask": "dropout dropout1d dropout2d dropout3d",
    "shape": "max_pool1d max_pool2d max_pool3d",
    # What follows from comparing values, or is an exponent; and what is not written yet when it is
    # saved (RReLU's noise, of torch's ops alone), so that the tensor itself has to be kept.
    "exact": "embedding ctc_loss logsumexp threshold threshold_ max min amax "
    "rrelu rrelu_ rrelu_with_noise rrelu_with_noise_",
}
_BY_OP: Final = {op: kind for kind, ops in _TABLE.items() for op in ops.split()}


def treatment(op: str) -> Treatment:
    """Return how floats of the size of its input that this op saved are kept.

    Parameters
    ----------
    op
        The function's name, as torch.nn.functional has it.

    Examples
    --------
    >>> [treatment(op) for op in ("conv2d", "relu", "gelu")]
    ['linear', 'sign', 'nonlinear']
    """
    return _BY_OP.get(op, "nonlinear")
