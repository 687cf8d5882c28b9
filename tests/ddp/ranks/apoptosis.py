"""One rank of three: all shrink alike, or all stop and nothing is changed."""

import copy

import torch
import torch.distributed as dist
from cases import LAST, RANK, assert_alike, assert_equal, message_of, same_on_all, weights_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_memory.apoptosis.torch import AgreementError, Apoptosis

CHOSEN = {
    "tolerance": 0.05, "min_width": 4, "round_to": 4, "overhead": None, "schedule": "aggressive",
}  # fmt: skip
# Batches that decide are not saved: the last eight steps before an event are after the checkpoint.
STEPS, EVERY, SAVED = 30, 10, 2


def batch(step):
    return torch.randn(64, 6, generator=torch.Generator().manual_seed(1000 * step + RANK))


def ranks_that_differ_all_stop():
    """In weights, in settings, in whether they saw a batch."""
    for odd, seed, settings in (
        ("weights", RANK, {}),
        ("settings", 0, {"tolerance": 0.05 if RANK else 1e-6, "min_width": 4 + 8 * RANK}),
        ("batch", 0, {}),
    ):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
        with torch.no_grad():  # twins, which any tolerance merges
            for part in (model[0].weight, model[0].bias):
                part[8:] = part[:8].repeat(2, *[1] * (part.ndim - 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        shrink = Apoptosis(model, optimizer, every=2, **CHOSEN | settings)
        before = weights_of(model)
        if odd != "batch" or RANK:
            model(batch(0))
        shrink.step()
        assert "different on ranks" in message_of(shrink.step, AgreementError), odd
        assert_equal(before, model.parameters())


class Training:
    """A net, its optimizer and apoptosis, under DDP."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        hidden = [nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU()]
        self.model = nn.Sequential(*hidden, nn.Linear(48, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.apoptosis = Apoptosis(self.model, self.optimizer, every=EVERY, **CHOSEN)
        self.parts = self.apoptosis, self.model, self.optimizer
        self.ddp = None

    def save(self):
        return copy.deepcopy([part.state_dict() for part in self.parts])

    def load(self, states):
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))  # optimizers keep what they are given
        self.ddp = None

    def run(self, first, last):
        """Train; return the steps after which the net shrank."""
        events = []
        for step in range(first, last):
            self.ddp = self.ddp or DistributedDataParallel(self.model)
            x = batch(step)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.ddp(x), x[:, :1] * x[:, 1:2]).backward()
            self.optimizer.step()
            if self.apoptosis.step():
                self.ddp = None
                events.append(step)
                self.check_same()
        return events

    def check_same(self):
        assert_alike(self.model)
        for state in self.optimizer.state.values():
            assert same_on_all(state["exp_avg"])
            assert same_on_all(state["exp_avg_sq"])


def a_checkpoint_of_before_resumes_after():
    """Ranks are identical after every event; so is what goes on from before the first one."""
    whole = Training()
    early = whole.run(0, SAVED)
    assert not early, "the checkpoint has to be of before the first event"
    saved = whole.save()
    whole.ddp = None  # what it has learnt of buckets is not saved, and sums depend on it
    events = whole.run(SAVED, STEPS)
    assert len(events) >= 2
    whole.check_same()
    # In a new process, which makes the net anew; and in this one, where it has shrunk since.
    for again in (Training(seed=5), whole):
        expected = weights_of(whole.model)
        again.load(saved)
        assert again.model[0].out_features == 64
        assert again.run(SAVED, STEPS) == events
        assert_equal(again.model.parameters(), expected)
        assert again.model[0].out_features < 64


def a_rank_that_joins_late_gets_the_new_shapes():
    training = Training()
    assert training.run(0, EVERY)
    sent = [training.save()]
    if LAST:  # as wide as the code makes it, and with other weights
        training = Training(seed=9)
    dist.broadcast_object_list(sent, src=0)
    training.load(sent[0])
    assert training.model[0].out_features < 64
    training.run(EVERY, STEPS)
    training.check_same()


CASES = [
    ranks_that_differ_all_stop, a_checkpoint_of_before_resumes_after,
    a_rank_that_joins_late_gets_the_new_shapes,
]  # fmt: skip
