"""One rank: train with AutoCompression; the clock says that it pays, or that it does not."""

from functools import partial

import horovod.torch as hvd
import torch
from nets import assert_alike, batch, wrap
from rank_programs import Clock, tuner_lines
from torch import nn

from sn_compress import AutoCompression
from sn_compress.prediction import tuning
from sn_compress.prediction.rates import FREE
from sn_compress.torch import horovod as rim
from sn_compress.torch.under_horovod.memory import memory_of

STEPS = 40


class Training:
    """A net whose compressed steps take so long, plain ones a second, or by a real clock."""

    def __init__(self, trial_s=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))
        self.optimizer = wrap(self.model, AutoCompression, lr=0.05, momentum=0.9)
        self.memory = memory_of(self.optimizer)
        self.trial_s, self.clock, self.seen = trial_s, Clock(), set()
        if trial_s is not None:
            self.memory.engine.tuner = tuning.Tuner(
                AutoCompression.settings,
                ranks=hvd.size(),
                total=partial(rim.total, self.memory, hvd.global_process_set),
                rates=FREE,
                clock=self.clock,
            )

    def run(self, steps):
        for step in range(steps):
            self.optimizer.zero_grad()
            self.model(batch(step, 8, 64)).square().mean().backward()
            self.optimizer.step()
            chosen = self.memory.engine.tuner.choice
            self.seen.add(chosen)
            self.clock.now += self.trial_s if self.trial_s and chosen != "plain" else 1.0
        assert_alike(self.model)
        return AutoCompression.report(self.optimizer)


def by_the_real_clock():
    """Nobody knows what it says."""
    with tuner_lines(None) as lines:
        Training().run(STEPS)
    assert len([line for line in lines if "predicted" in line]) == 1, lines


def trained(trial_s):
    with tuner_lines() as lines:
        training = Training(trial_s)
        report = training.run(STEPS)
    assert "shared" in training.seen
    assert training.memory.engine.tuner.settled
    return training, report, lines


def where_it_pays_it_stays():
    training, _, lines = trained(0.5)
    assert training.memory.engine.exchange.remembers("0.weight")
    assert "500.0 ms a step, 1000.0 ms plain" in lines[-1], lines


def where_it_does_not_it_is_plain_for_good():
    """Counted as before, and never tried again; a state that is loaded changes nothing of it."""
    training, before, lines = trained(2.0)
    assert "plain Horovod is faster here" in lines[-1], lines
    left = training.memory.engine.exchange.remembers("0.weight")
    assert not left, "what was left went along with a plain step"
    assert before["steps"] == STEPS
    report = training.run(20)
    assert report["steps"] == STEPS + 20
    assert report["dense_bytes"] == before["dense_bytes"]
    saved = AutoCompression.state_dict(training.optimizer)
    AutoCompression.load_state_dict(training.optimizer, saved)
    assert training.run(3)["low_rank"] == 0


CASES = [by_the_real_clock, where_it_pays_it_stays, where_it_does_not_it_is_plain_for_good]
