"""Collective operations of threads by their earlier names; one class serves all devices."""

from torchdistpackage.parallel.auto.rendezvous import CollectiveBase, ThreadGather, ThreadSum

CollectiveOpetationBase = CollectiveBase
AllReduce = ThreadSum
AllGather = ThreadGather


def NCCLAllReduce(world_size: int) -> ThreadSum:
    """The sum over threads."""
    return ThreadSum(world_size)


def NCCLAllGather(world_size: int, dim: int) -> ThreadGather:
    """The threads' tensors joined along `dim`."""
    return ThreadGather(world_size, dim=dim)
