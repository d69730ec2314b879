"""An optimizer around another that holds shards: to schedulers, hooks and savers, the user's own.

Param groups, options and state are the inner optimizer's own objects, asked for each time, so that
a learning rate changes for both. state_dict.py saves and loads.
"""

from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from torchdistpackage.comm.attendance import expect_all
from torchdistpackage.comm.groups import for_each_group
from torchdistpackage.ddp.sharded import OWNERS, ParamPartition
from torchdistpackage.ddp.zero.state_dict import StateSaver
from torchdistpackage.errors import CheckpointError, LayoutError


class ShardedOptimizerBase(Optimizer):
    """Takes the user's parameters out of `inner` and puts the shards held here in their place.

    inner: as the user built it; its state is kept. partitions: of each of its param groups, the
    parameters in order. Subclasses define `step`, `zero_grad`, `_settle` and `refresh_masters`.
    """

    def __init__(self, inner: Optimizer, partitions: Sequence[Sequence[ParamPartition]]):
        before = inner.state_dict()
        self.inner, self.partitions = inner, [list(members) for members in partitions]
        OWNERS.add(self)
        # Optimizer.__init__ would make groups of its own; this gives us its hooks
        self.__setstate__({})
        for group, members in zip(inner.param_groups, self.partitions, strict=True):
            group["params"][:] = [h.mine for h in members if h.mine is not None]
        if before["state"]:  # Adagrad has some from the start, others may have been loaded
            inner.state.clear()
            self._saver.load_whole(before)

    @property
    def param_groups(self) -> list[dict]:
        return self.inner.param_groups

    @property
    def state(self) -> dict:
        """States of the pieces held here, by piece."""
        return self.inner.state

    @property
    def defaults(self) -> dict:
        return self.inner.defaults

    def add_param_group(self, param_group: dict) -> None:
        """Raise LayoutError: what each rank owns is settled at the start."""
        raise LayoutError(
            f"{type(self).__name__} cannot take a param group later: its {len(self.param_groups)} "
            f"groups are cut and laid out over the ranks; give all groups to the optimizer before "
            f"it is wrapped, or take its state_dict(), remove() it, wrap a new one and load that"
        )

    def refresh_masters(self) -> None:
        """Set masters to the parameters, after these were written to."""

    def _settle(self) -> None:
        """Wait for everything in flight, so that parameters and state are whole and current."""

    def forget(self) -> None:
        """Give up its parameters; from here on it owns none."""
        OWNERS.discard(self)

    @property
    def _saver(self) -> StateSaver:
        """Made for each call, as it keeps this."""
        return StateSaver(self, self.inner, self.partitions, self.refresh_masters)

    def state_dict(self, *, to: int | None = None, cpu: bool = False) -> dict:
        """All of the state, as the plain optimizer has it, and a "master" where one is kept.

        Collective: all ranks call it, also where one of them saves. to: index, in the group that
        shares, of the rank that gets the state, on the others it stays empty; default all. cpu:
        tensors go there.

        Raises:
            CheckpointError: ranks hold different kinds of state for one parameter.
            CommError: `to` is no index in a group, or other ranks have not called it in time.
        """
        self.expect_all("ZeroOptimizer.state_dict()")
        self._settle()
        return self._saver.state_dict(to, cpu)

    def expect_all(self, what: str) -> None:
        """Raise CommError if other ranks that share do not call `what`, which is collective."""
        members = (partition for some in self.partitions for partition in some)
        for group, _ in for_each_group(members, min_size=2):
            expect_all(what, group)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take my part of a dict of `state_dict`, of any size and stage, or of a plain optimizer.

        Every rank gives the same dict; nothing is sent. Without masters in it they are set to the
        parameters, so load the model first. Tensors are copied, and cast as the inner optimizer's
        own `load_state_dict` does.

        Raises:
            CheckpointError: it is of other parameters.
        """
        self._settle()
        self._saver.load_state_dict(dict(state_dict))

    def shard_state_dict(self) -> dict:
        """The state that this rank holds, without messages; loads at the same size and stage alone.

        {"state": {i: ...}, "ranges": {i: (start, stop)}, "param_groups": [...]}, numbered as in
        `state_dict`. The inner optimizer's tensors are its own, not copies, as torch has it.
        """
        self._settle()
        return self._saver.shard_state_dict()

    def load_shard_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take back this rank's own `shard_state_dict`.

        Raises:
            CheckpointError: parameters are cut otherwise here.
        """
        self._settle()
        self._saver.load_shard_state_dict(state_dict)

    def __getstate__(self) -> dict:
        raise CheckpointError(
            f"{type(self).__name__} is tied to its ranks and cannot be copied or pickled; save its "
            f"state_dict(), build it again and load that"
        )
