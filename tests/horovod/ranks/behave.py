"""One rank: what a compression does at the edges, one function a case."""

import contextlib
import io
from functools import partial

import horovod.torch as hvd
import nets
import torch
from cases import message_of
from counted import SHAPES, transforms
from nets import assert_alike, assert_equal, batch, said_by_all
from torch import nn

from sn_compress import AutoCompression, CastCompression, FFTCompression, LowRankCompression
from sn_compress.ops.casts import Cast

GATHER = FFTCompression
SHARED = LowRankCompression.using(ratio=8, warmup=2, every=4)
EXACT = FFTCompression.using(theta=0.0, values="fp16")


def wrap(model, compression=GATHER, **options):
    return nets.wrap(model, compression, **{"momentum": 0.9, **options})


def mean_is_the_mean():
    """Keeping every bin at half precision, the result is the plain mean up to rounding.

    Half precision rounds each coefficient by 2**-11 relative; the transform keeps norms. Doubles
    travel as they are, and nodes sum them in an order of their own.
    """
    for dtype, op, bound in (
        (torch.float32, hvd.Average, 2**-10), (torch.float32, hvd.Sum, hvd.size() * 2**-10),
        (torch.float64, hvd.Average, 2**-51),
    ):  # fmt: skip
        model = nn.Linear(64, 64, bias=False).to(dtype)
        optimizer = wrap(model, EXACT, op=op)
        torch.manual_seed(hvd.rank())
        gradient = torch.randn(64, 64, dtype=dtype)
        model.weight.grad = gradient.clone()
        optimizer.synchronize()
        plain = hvd.allreduce(gradient, op=op, name="plain")
        error = (model.weight.grad - plain).norm() / gradient.norm()
        assert error <= bound, (dtype, error)
        optimizer.zero_grad()


def casts_are_added_up_in_float32():
    """The mean of rounded gradients, rounded once, in a quarter or half of the bytes."""
    for dtype in ("fp16", "bf16", "fp8"):
        way, cast, model = CastCompression.using(dtype=dtype), Cast(dtype), nn.Linear(64, 64)
        optimizer = wrap(model, way)
        torch.manual_seed(hvd.rank())
        gradient = torch.randn(64, 64)
        model.weight.grad, model.bias.grad = gradient.clone(), torch.zeros(64)
        optimizer.synchronize()
        total = torch.zeros(64 * 64)
        for own in hvd.allgather(cast.decode(cast.encode(gradient.view(-1)))[None].float()):
            total += own
        due = cast.decode(cast.encode(total / hvd.size()))
        assert torch.equal(model.weight.grad.view(-1), due.float()), dtype
        report = way.report(optimizer)
        nbytes = 64 * 64 // 256 * 257 if dtype == "fp8" else 2 * 64 * 64
        assert (report["cast"], report["payload_bytes"]) == (1, nbytes + 4 * 64), report
        with optimizer.skip_synchronize():
            optimizer.step()


def memory_drains():
    """What one step dropped arrives in the following ones."""
    torch.manual_seed(0)  # ranks with different weights would be told so
    model = nn.Linear(64, 64, bias=False)
    optimizer = wrap(model, FFTCompression.using(theta=0.9))
    torch.manual_seed(hvd.rank())
    gradient = torch.randn(64, 64)
    total = torch.zeros(64, 64)
    for step in range(200):
        model.weight.grad = gradient.clone() if step == 0 else torch.zeros(64, 64)
        optimizer.synchronize()
        total += model.weight.grad
        with optimizer.skip_synchronize():
            optimizer.zero_grad()
    plain = hvd.allreduce(gradient, name="plain")
    # What is not yet sent is less than what 4-bit rounding leaves over: a fifth of a bin, again
    # and again; 200 steps of a tenth of the bins send each twenty times.
    assert (total - plain).norm() < 1e-3 * plain.norm(), (total - plain).norm() / plain.norm()


def not_a_number_reaches_all():
    """In gathers, dense steps and sums; it is gone afterwards, and was never remembered."""
    for way in (GATHER, SHARED):
        model = nn.Linear(64, 64)
        optimizer = wrap(model, way)
        bads = [float("nan"), float("inf"), -float("inf")]
        for step in range(14):
            bad = step % 3 == 2
            model.weight.grad, model.bias.grad = torch.randn(64, 64), torch.ones(64)
            if bad and hvd.rank() == hvd.size() - 1:
                model.weight.grad[3, 3] = bads[step // 3 % 3]
            optimizer.synchronize()
            finite = torch.isfinite(model.weight.grad)
            assert finite.all() != bad, step
            assert way is SHARED or finite.any() != bad, "every rank has to see it"
            assert torch.isfinite(model.bias.grad).all()
            kept = FFTCompression.state_dict(optimizer)["feedback"]["memory"]
            # By nodes the owner alone remembers a gradient.
            assert any(hvd.allgather_object(bool(kept))) == (way is GATHER)
            parts = [part for entry in kept.values() for part in entry["state"]["arrays"]]
            assert all(torch.isfinite(part).all() for part in parts)
            optimizer.zero_grad()


def sparse_travels_as_plain():
    for sparse_as_dense in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(512, 64, sparse=True)
        options = {"lr": 1.0, "momentum": 0.0, "sparse_as_dense": sparse_as_dense}
        optimizer = wrap(table, EXACT, **options)
        before = table.weight.detach().clone()
        table(torch.tensor([hvd.rank(), 100])).sum().backward()
        optimizer.step()
        step = before - table.weight.detach()
        # Row 100 has gradient one on every rank, so its mean is one; row `rank` on one rank only.
        assert torch.allclose(step[100], torch.ones(64), atol=2e-3), step[100]
        assert torch.allclose(step[hvd.rank()], torch.full((64,), 1 / hvd.size()), atol=2e-3)


def plain_allreduce():
    """The same object serves hvd.allreduce."""
    torch.manual_seed(hvd.rank())
    tensor = torch.randn(3, 4000)
    expected = hvd.allreduce(tensor, name="plain")
    scaled = hvd.allreduce(tensor, compression=EXACT, op=hvd.Sum, prescale_factor=0.5)
    assert torch.allclose(scaled, expected * hvd.size() / 2, atol=0.01)
    group = hvd.grouped_allreduce([tensor, tensor + 1], name="group", compression=EXACT)
    assert torch.allclose(group[1], expected + 1, atol=0.01)
    watched = tensor.clone().requires_grad_()
    weights = torch.arange(12000.0).reshape(3, 4000)
    (hvd.allreduce(watched, name="watched", compression=EXACT) * weights).sum().backward()
    assert torch.allclose(watched.grad, weights), "gradients flow as in plain"


def every_type_is_reduced_or_refused():
    """As Horovod does it: what it takes comes out as without compression, the rest raises."""
    torch.manual_seed(hvd.rank())
    values = torch.randint(1, 7, (2, 2048))
    right = set()
    types = {it for it in vars(torch).values() if isinstance(it, torch.dtype)}
    for dtype in sorted(types, key=str):
        found = []
        for compression in (hvd.Compression.none, EXACT, SHARED):
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                name = f"type.{dtype}.{len(found)}"
                own = values.to(dtype)
                total = hvd.allreduce(own, name=name, op=hvd.Sum, compression=compression)
                assert (total.dtype, total.shape) == (dtype, values.shape)
                found.append(total.double())
        if dtype == torch.bfloat16:  # Horovod itself reduces none
            found.insert(0, hvd.allreduce(values.double(), name="wide", op=hvd.Sum))
        assert len(found) in (0, 3), (dtype, len(found))
        if found:
            right.add(dtype)
            for total in found[1:]:
                # Rounded by half precision at most; whole numbers travel as they are.
                assert (total - found[0]).norm() <= 2**-7 * found[0].norm(), dtype
    floats = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    assert right >= floats | {torch.int32, torch.int64}, right


def refusals():
    tensor = torch.ones(4096)
    for call, word in (
        (lambda: hvd.reducescatter(tensor, compression=FFTCompression), "reducescatter"),
        (lambda: hvd.allreduce(tensor, op=hvd.Min, compression=FFTCompression), "hvd.Average"),
        (lambda: hvd.allreduce(tensor, op=hvd.Adasum, compression=FFTCompression), "Adasum"),
        (lambda: FFTCompression.compress(tensor), "not called by Horovod"),
        (lambda: FFTCompression.report(torch.optim.SGD([tensor], lr=1)), "DistributedOptimizer"),
        (lambda: hvd.allreduce(tensor, compression=AutoCompression, op=hvd.Min), "hvd.Average"),
        (lambda: FFTCompression.compress([1.0]), "list"),
    ):
        assert word in message_of(call), message_of(call)
    model = nn.Linear(64, 64)
    optimizer = wrap(model, op=hvd.Adasum)
    assert "Adasum" in message_of(lambda: model(torch.ones(4, 64)).sum().backward())
    del optimizer


def several_evaluations_a_step_are_refused():
    """As in DDP, in the first step too: of a whole data set there may be no other."""
    model = net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=3),
        named_parameters=model.named_parameters(), compression=GATHER,
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        loss = model(batch(0, 8, 96)).square().mean()
        loss.backward()
        optimizer.synchronize()
        return loss

    def step():
        with optimizer.skip_synchronize():
            optimizer.step(closure)

    assert "LBFGS evaluates its closure several times" in said_by_all(step)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 64))


def fresh(way):
    model = net()
    return model, wrap(model, way)


def backward(model, seed, factor=1.0):
    (factor * model(batch(seed, 8, 96)).square().mean()).backward()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def resume():
    """A run continued from its saved state gives the bits of the uninterrupted one."""
    for way in (GATHER, SHARED, CastCompression.using(dtype="fp8")):
        whole, optimizer = fresh(way)
        train(whole, optimizer, range(12))
        half, optimizer = fresh(way)
        train(half, optimizer, range(6))
        file = io.BytesIO()
        states = [half.state_dict(), optimizer.state_dict(), FFTCompression.state_dict(optimizer)]
        torch.save(states, file)
        file.seek(0)
        model, optimizer = fresh(way)
        weights, moments, memory = torch.load(file, weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        FFTCompression.load_state_dict(optimizer, memory)
        train(model, optimizer, range(6, 12))
        assert_equal(whole.parameters(), model.parameters())


def plain_allreduce_that_shares():
    """A named one is kept track of, an unnamed one travels plain."""
    for dtype in (torch.float32, torch.bfloat16):
        given, got = torch.zeros(60, 40), torch.zeros(60, 40)
        for step in range(60):
            tensor = batch(step, 60, 40).to(dtype)
            given += tensor.float()
            mean = hvd.allreduce(tensor, name=f"ours.{dtype}", compression=SHARED)
            assert mean.dtype == dtype
            got += mean.float()
        due = hvd.allreduce(given, name="plain")
        # What is outstanding is a few steps' gradient, of norm at most that of the mean each.
        assert (due - got).norm() < due.norm()
    assert torch.equal(
        hvd.allreduce(tensor.float(), compression=SHARED), hvd.allreduce(tensor.float())
    )


def bare_computes_ffts():
    """One of each gradient's blocks, whatever its shape."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(shape) for shape in SHAPES])
    optimizer = wrap(model)
    with transforms() as found:
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.synchronize()
    assert found == ["fft"] * 3, found


def trained(way, steps, each=None, **options):
    """A net after some steps, and what its optimizer has yet to send; each(...) before a step."""
    model = net()
    optimizer = wrap(model, way, **options)
    for step in range(steps):
        if each is None or step < 3:
            train(model, optimizer, [step])
        else:
            optimizer.zero_grad()
            each(model, optimizer, step)
    assert_alike(model)
    left = {n: r.clone() for n, r in way.residuals(optimizer).items()}
    return [p.detach().clone() for p in model.parameters()], left


def a_gradient_is_exchanged_once():
    """`step()` behind `synchronize()`: what was clipped is applied, to the bit.

    With `backward_passes_per_step` the pass behind a repeated exchange is exchanged.
    """

    def exchanging(passes, times):
        def each(model, optimizer, step):
            for turn in range(passes):
                backward(model, 10 * step + turn)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if times == 1:
                with optimizer.skip_synchronize():
                    optimizer.step()
                return
            for _ in range(times - 2):
                optimizer.synchronize()
            optimizer.step()

        return each

    for way, passes, times in (
        (GATHER.using(theta=0.9), 1, 3), (SHARED, 1, 3), (SHARED.using(check_every=3), 1, 3),
        (SHARED, 2, 2),
    ):  # fmt: skip
        options = {"backward_passes_per_step": passes}
        once = trained(way, 9, exchanging(passes, 1), **options)
        again = trained(way, 9, exchanging(passes, times), **options)
        assert_equal(once[0], again[0], way)
        assert_equal(once[1].values(), again[1].values(), way)


def ranks_that_exchange_again_alone_are_told():
    def alone(model, optimizer, step):
        backward(model, step)
        optimizer.synchronize()
        if hvd.rank():
            backward(model, step)
        optimizer.synchronize()

    for way in (GATHER, SHARED):
        said = message_of(partial(trained, way, 4, alone))
        assert "synchronized again" in said, said


def what_is_thrown_away_leaves_no_trace():
    """A step that the loop drops, whose gradients are large, and others accumulated into none."""

    def drops(model, optimizer, step):
        backward(model, step)
        optimizer.step()
        for factor in (1e4, 1.0):
            optimizer.zero_grad()
            backward(model, 50 + step, factor)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)

    for way in (GATHER.using(theta=0.9), SHARED.using(every=100)):
        plain, dropped = trained(way, 8), trained(way, 8, drops)
        assert_equal(plain[0], dropped[0], way)


def what_was_dropped_last_has_no_residual():
    """Behind the last step of a loop, when no backward pass asks any more."""
    for way in (GATHER.using(theta=0.9), SHARED.using(every=100)):
        model, optimizer = fresh(way)
        train(model, optimizer, range(5))
        before = {n: r.clone() for n, r in way.residuals(optimizer).items()}
        optimizer.zero_grad()
        backward(model, 9, 1e4)
        optimizer.synchronize()
        optimizer.zero_grad()
        assert before
        assert_equal(before.values(), way.residuals(optimizer).values(), way)


def what_a_rank_that_joined_has_yet_to_send_is_not_lost():
    """The last rank's last step was dense and left nothing to send; the others' is left."""
    way = SHARED.using(warmup=1, every=4)
    model, optimizer = fresh(way)
    train(model, optimizer, range(4))
    left = {
        name: hvd.broadcast(values, 0, name=f"left.{name}")
        for name, values in way.residuals(optimizer).items()
    }
    if hvd.rank() == hvd.size() - 1:
        train(model, optimizer, [4])
    last = hvd.join()
    way.synchronize(optimizer, root_rank=last)
    assert last == hvd.size() - 1
    found = way.residuals(optimizer)
    assert found.keys() == left.keys(), found.keys()
    for name, values in left.items():
        due = values / hvd.size()
        assert (found[name] - due).norm() < 1e-5 * due.norm(), name


def a_compiled_step_is_as_an_eager_one():
    """Also where it sends gradients itself, as those that were set by hand."""
    for way in (GATHER.using(theta=0.9), SHARED.using(check_every=2)):
        ends = []
        for compiled in (False, True):
            model, optimizer = fresh(way)
            update = optimizer.step
            if compiled:
                update = torch.compile(update, backend="eager")
            for step in range(5):
                optimizer.zero_grad()
                if step % 2:
                    backward(model, step)
                else:
                    for parameter in model.parameters():
                        parameter.grad = batch(step, *parameter.shape)
                update()
            ends.append([p.detach().clone() for p in model.parameters()])
        assert_equal(*ends, way)


# The one that joins is last: after it Horovod names what has no name differently on each rank.
CASES = [
    what_was_dropped_last_has_no_residual, a_compiled_step_is_as_an_eager_one,
    a_gradient_is_exchanged_once, ranks_that_exchange_again_alone_are_told,
    what_is_thrown_away_leaves_no_trace,
    bare_computes_ffts, plain_allreduce_that_shares, casts_are_added_up_in_float32,
    mean_is_the_mean, memory_drains, not_a_number_reaches_all, sparse_travels_as_plain,
    plain_allreduce, every_type_is_reduced_or_refused, refusals, resume,
    several_evaluations_a_step_are_refused,
    what_a_rank_that_joined_has_yet_to_send_is_not_lost,
]  # fmt: skip
