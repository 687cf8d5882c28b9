"""One rank whose link is cut in mid-run: `cut.py gather|shared FOLDER`.

Says in a file where it is, so that the test knows when to cut, and ends with the sum of its
weights, or with Horovod's error.
"""

import hashlib
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from nets import batch, vector, wrap
from torch import nn

from sn_compress import FFTCompression, LowRankCompression

torch.set_num_threads(1)
exchange, folder = sys.argv[1], Path(sys.argv[2])
hvd.init()
torch.manual_seed(0)
model = nn.Linear(128, 128)
WAYS = {
    "gather": FFTCompression.using(theta=0.9),
    "shared": LowRankCompression.using(warmup=3, ratio=10),
}
optimizer = wrap(model, WAYS[exchange], lr=0.01)
mine = folder / f"rank{hvd.rank()}"
for step in range(60):
    optimizer.zero_grad()
    model(batch(step, 8, 128)).square().mean().backward()
    try:
        optimizer.step()
    except hvd.mpi_ops.HorovodInternalError:
        mine.write_text("error")
        raise
    mine.write_text(f"step {step}")
    time.sleep(0.05)
mine.write_text("weights " + hashlib.sha256(vector(model).numpy().tobytes()).hexdigest())
