"""One rank: theta follows every kind of schedule in Horovod's torch."""

import horovod.torch as hvd
from behave import backward, net
from nets import assert_equal, wrap
from schedule_kinds import KINDS, Watch, check

from sn_compress import FFTCompression

STEPS, HALF = 14, 7


def fresh(kind):
    model = net()
    compression = FFTCompression.using(theta=KINDS[kind])
    return model, wrap(model, compression, backward_passes_per_step=2)


def every_kind_of_schedule():
    watch = Watch()

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            for turn in (2 * step, 2 * step + 1):
                backward(model, turn)
            optimizer.step()
            watch.end_step()
        return hvd.allgather_object(watch.taken())

    for kind in KINDS:
        whole, optimizer = fresh(kind)
        check(kind, train(whole, optimizer, range(STEPS)))

        half, optimizer = fresh(kind)
        train(half, optimizer, range(HALF))
        saved, weights = FFTCompression.state_dict(optimizer), half.state_dict()
        again, optimizer = fresh(kind)
        again.load_state_dict(weights)
        FFTCompression.load_state_dict(optimizer, saved)
        assert_later(kind, train(again, optimizer, range(HALF, STEPS)))
        assert_equal(again.parameters(), whole.parameters(), f"{kind}: the resumed run differs")

        # A rank that comes anew, as in an elastic run, is where the others are.
        late, optimizer = fresh(kind)
        late.load_state_dict(weights)
        if hvd.rank() == 0:
            FFTCompression.load_state_dict(optimizer, saved)
        FFTCompression.synchronize(optimizer)
        assert_later(kind, train(late, optimizer, range(HALF, STEPS)))


def assert_later(kind, every):
    expected = [KINDS[kind].theta(step) for step in range(HALF, STEPS)]
    assert every == [expected] * hvd.size(), f"{kind}: a rank is elsewhere"


CASES = [every_kind_of_schedule]
