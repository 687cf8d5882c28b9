"""One of four ranks: a perceptron shrinks; a checkpoint is resumed, and a rank joins late.

Run as `apoptosis_net.py RANK RANKS FILE`; prints "ok CASE" for each.
"""

import copy
import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_memory.apoptosis.torch import Apoptosis

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
# Batches that decide are not saved: the last eight steps before an event are after the checkpoint.
STEPS, EVERY, SAVED = 30, 10, 2


class Training:
    """A net, its optimizer and apoptosis, under DDP."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        hidden = [nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU()]
        self.model = nn.Sequential(*hidden, nn.Linear(48, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.apoptosis = Apoptosis(
            self.model, self.optimizer, tolerance=0.05, every=EVERY, min_width=4, round_to=4,
            schedule="aggressive", overhead=None,
        )  # fmt: skip
        self.ddp = None

    def save(self):
        return copy.deepcopy([part.state_dict() for part in self.parts])

    def load(self, states):
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))  # optimizers keep what they are given
        self.ddp = None

    @property
    def parts(self):
        return self.apoptosis, self.model, self.optimizer

    def run(self, first, last):
        """Train; return the steps after which the net shrank."""
        events = []
        for step in range(first, last):
            self.ddp = self.ddp or DistributedDataParallel(self.model)
            random = torch.Generator().manual_seed(1000 * step + RANK)
            x = torch.randn(64, 6, generator=random)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.ddp(x), x[:, :1] * x[:, 1:2]).backward()
            self.optimizer.step()
            if self.apoptosis.step():
                self.ddp = None
                events.append(step)
                self.check_same()
        return events

    def check_same(self):
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
                every = [torch.empty_like(tensor) for _ in range(RANKS)]
                dist.all_gather(every, tensor.contiguous())
                assert all(torch.equal(every[0], other) for other in every)


def identical_after_every_event():
    training = Training()
    events = training.run(0, STEPS)
    assert len(events) >= 2
    training.check_same()
    assert training.model[0].out_features < 64


def a_checkpoint_of_before_resumes_after():
    whole = Training()
    early = whole.run(0, SAVED)
    assert not early, "the checkpoint has to be of before the first event"
    saved = whole.save()
    whole.ddp = None  # what it has learnt of buckets is not saved, and sums depend on it
    events = whole.run(SAVED, STEPS)
    # In a new process, which makes the net anew; and in this one, where it has shrunk since.
    for again in (Training(seed=5), whole):
        expected = [parameter.detach().clone() for parameter in whole.model.parameters()]
        again.load(saved)
        assert again.model[0].out_features == 64
        assert again.run(SAVED, STEPS) == events
        for ours, theirs in zip(again.model.parameters(), expected, strict=True):
            assert torch.equal(ours, theirs)


def a_rank_that_joins_late_gets_the_new_shapes():
    training = Training()
    assert training.run(0, EVERY)
    sent = [training.save()]
    if RANK == RANKS - 1:  # as wide as the code makes it, and with other weights
        training = Training(seed=9)
    dist.broadcast_object_list(sent, src=0)
    training.load(sent[0])
    assert training.model[0].out_features < 64
    training.run(EVERY, STEPS)
    training.check_same()


torch.set_num_threads(1)
wait = datetime.timedelta(seconds=90)
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS, timeout=wait
)
for case in (
    identical_after_every_event,
    a_checkpoint_of_before_resumes_after,
    a_rank_that_joins_late_gets_the_new_shapes,
):
    case()
    dist.barrier()
    print("ok", case.__name__, flush=True)
time.sleep(0.2)  # docs/ddp.md says why
dist.destroy_process_group()
