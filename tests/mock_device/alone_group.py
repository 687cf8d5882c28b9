"""A process group of one rank for tensors on any device: each collective is a copy."""

import torch
import torch.distributed as dist


class Done(dist.Work):
    """What is done when it is asked for."""

    def __init__(self, result):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout=None):
        return True

    def get_future(self):
        return self.future


class AloneGroup(dist.ProcessGroup):
    """One rank: sums are what it has, gathers its own."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        assert size == 1

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors, opts=None):
        return Done(tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        return Done(tensors)

    def broadcast(self, tensors, opts=None):
        return Done(tensors)

    def barrier(self, opts=None):
        return Done([])

    def allgather(self, outputs, inputs, opts=None):
        for targets, source in zip(outputs, inputs, strict=True):
            targets[0].copy_(source)
        return Done(outputs)

    def all_gather_single(self, output, source, opts=None):
        return self._copied([output], [source])

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self._copied(outputs, inputs)

    def reduce_scatter_single(self, output, source, opts=None):
        return self._copied([output], [source])

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        return self._copied(outputs, inputs)

    # Of older torch.
    _allgather_base, allgather_into_tensor_coalesced = (
        all_gather_single,
        all_gather_single_coalesced,
    )
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _copied(self, outputs, inputs):
        for target, source in zip(outputs, inputs, strict=True):
            target.view(-1).copy_(source.reshape(-1))
        return Done(outputs)

    def getBackendName(self):  # noqa: N802 - torch asks by it
        return "alone"


def init_alone(device_type, meet):
    """Let this process be a group of one rank, for tensors on the CPU and on a device."""
    if "alone" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "alone", lambda store, rank, size, timeout: AloneGroup(rank, size),
            devices=["cpu", device_type],
        )  # fmt: skip
    dist.init_process_group("alone", init_method=f"file://{meet}", rank=0, world_size=1)
