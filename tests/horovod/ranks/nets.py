"""What scripts of ranks of torch share: a wrapped optimizer, data, what all ranks have alike."""

import horovod.torch as hvd
import torch
from cases import message_of


def wrap(model, compression=hvd.Compression.none, named=None, *, lr=0.1, momentum=0.0, **options):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum),
        named_parameters=named or model.named_parameters(),
        compression=compression,
        **options,
    )


def batch(step, *shape):
    generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
    return torch.randn(*shape, generator=generator)


def vector(model):
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def same_on_all(tensor, **where):
    every = hvd.allgather(tensor.detach()[None], name="everyone", **where)
    return torch.equal(every, every[:1].expand_as(every))


def assert_alike(model, **where):
    flat = vector(model)
    assert torch.isfinite(flat).all()
    assert same_on_all(flat, **where), "ranks differ"


def assert_equal(some, others, why=""):
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one, other), why


def said_by_all(call):
    """The message that every rank was given; it has to be the same one."""
    every = hvd.allgather_object(message_of(call))
    assert len(set(every)) == 1, every
    return every[0]
