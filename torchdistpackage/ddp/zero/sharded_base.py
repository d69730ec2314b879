"""The base of an optimizer around another, which looks to schedulers and savers like the user's
own.

Param groups, options and state are the inner optimizer's own objects, looked up each time, so that
a new learning rate applies to both. state_dict.py saves and loads.
"""

from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from torchdistpackage.comm.attendance import expect_all
from torchdistpackage.comm.groups import for_each_group
from torchdistpackage.ddp.sharded import OWNERS, ParamPartition
from torchdistpackage.ddp.zero.state_dict import StateSaver
from torchdistpackage.errors import CheckpointError, LayoutError


class ShardedOptimizerBase(Optimizer):
    """An optimizer that replaces the parameters in `inner` by this rank's shards.

    Subclasses define `step`, `zero_grad`, `_settle` and `refresh_masters`.

    inner: the optimizer as the user built it; its state is kept.
    partitions: the parameters of each of its param groups, in order.
    """

    def __init__(self, inner: Optimizer, partitions: Sequence[Sequence[ParamPartition]]):
        initial = inner.state_dict()
        self.inner, self.partitions = inner, [list(members) for members in partitions]
        OWNERS.add(self)
        # sets up Optimizer's hooks; Optimizer.__init__ would create param groups too
        self.__setstate__({})
        for group, members in zip(inner.param_groups, self.partitions, strict=True):
            group["params"][:] = [
                partition.own_tensor for partition in members if partition.own_tensor is not None
            ]
        if initial["state"]:  # Adagrad has state from the start, and others may have loaded some
            inner.state.clear()
            self._saver.load_whole(initial)

    @property
    def param_groups(self) -> list[dict]:
        return self.inner.param_groups

    @property
    def state(self) -> dict:
        """The state of each shard on this rank."""
        return self.inner.state

    @property
    def defaults(self) -> dict:
        return self.inner.defaults

    def add_param_group(self, param_group: dict) -> None:
        """Raise LayoutError, because the shards of each rank are fixed at the start."""
        raise LayoutError(
            f"{type(self).__name__} cannot take a param group later: its {len(self.param_groups)} "
            f"groups are cut and laid out over the ranks; give all groups to the optimizer before "
            f"it is wrapped, or take its state_dict(), remove() it, wrap a new one and load that"
        )

    def refresh_masters(self) -> None:
        """Set masters to the parameters, after a user wrote to these."""

    def _settle(self) -> None:
        """Wait for everything in flight, so that parameters and state are complete and current."""

    def gather_shards(self) -> None:
        """Gather parameters anew, after the caller wrote to the shards; all ranks call it."""
        raise NotImplementedError

    def forget(self) -> None:
        """Give up the ownership of all parameters."""
        OWNERS.discard(self)

    @property
    def _saver(self) -> StateSaver:
        """A saver, created for each call because it refers to this optimizer."""
        return StateSaver(self, self.inner, self.partitions, self.refresh_masters)

    def state_dict(self, *, to: int | None = None, cpu: bool = False) -> dict:
        """Return the full state, in the plain optimizer's form, with a "master" where one is kept.

        All ranks call it, even if only one of them saves.

        to: index, in the sharding group, of the rank that gets the state; the other ranks get an
            empty one. Default: all ranks get it.
        cpu: move tensors to the CPU.

        Raises:
            CheckpointError: ranks hold different kinds of state for one parameter.
            CommError: `to` is not an index in a group, or other ranks did not call it in time.
        """
        self.expect_all("ZeroOptimizer.state_dict()")
        self._settle()
        return self._saver.state_dict(to, cpu)

    def expect_all(self, call: str) -> None:
        """Raise CommError if other ranks do not call the collective function `call` in time."""
        members = (partition for group in self.partitions for partition in group)
        for group, _ in for_each_group(members, min_size=2):
            expect_all(call, group)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load a full state: of a plain optimizer, or of `state_dict` at any size and stage.

        Every rank passes the same dict; nothing is sent. If it has no masters they are set to the
        parameters, so load the model first. Tensors are copied, and cast as in the inner
        optimizer's `load_state_dict`.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        self._settle()
        self._saver.load_state_dict(dict(state_dict))

    def shard_state_dict(self) -> dict:
        """Return this rank's state, without messages; it loads only at the same size and stage.

        {"state": {i: ...}, "ranges": {i: (start, stop)}, "param_groups": [...]}, numbered as in
        `state_dict`. The inner optimizer's tensors are its own, not copies, as torch has it.
        """
        self._settle()
        return self._saver.shard_state_dict()

    def load_shard_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take back this rank's own `shard_state_dict`.

        Raises:
            CheckpointError: the parameters are cut differently.
        """
        self._settle()
        self._saver.load_shard_state_dict(state_dict)

    def __getstate__(self) -> dict:
        raise CheckpointError(
            f"{type(self).__name__} is tied to its ranks and cannot be copied or pickled; save its "
            f"state_dict(), build it again and load that"
        )
