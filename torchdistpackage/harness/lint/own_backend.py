"""What a back end of our own answers torch.distributed, whatever its calls then do.

One rule: torch calls a group and a handle by these names, which change with its version; they stand
here, so that the back ends (late, lint) define each call once.
"""

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.harness.lint.data_movement import rows

HERE = __file__
"""Between a program and what a back end does: no line that led to a call."""


class OwnWork(dist.Work):
    """Handle of a call. result: the tensors that the call writes."""

    def __init__(self, result: list[Tensor]):
        super().__init__()
        self._result = result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """Done when the backward ends in which it is asked for, else at once: who waits in a future
        cannot let others go on, so the work is waited for before anybody can."""
        future = torch.futures.Future()

        def settle() -> None:
            self.wait()
            future.set_result(self._result)

        if torch._C._current_graph_task_id() == -1:
            settle()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(settle)
        return future


class OwnGroup(dist.ProcessGroup):
    """One member's end of a group; `rank` is its place in it, as torch has it."""

    def __init__(self, rank: int, size: int, name: str, backend: str):
        super().__init__(rank, size)
        self._name, self._backend = name, backend

    def getBackendName(self) -> str:
        return self._backend

    @property
    def group_name(self) -> str:
        return self._name

    @abstractmethod
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts=None) -> dist.Work: ...

    @abstractmethod
    def all_gather_single_coalesced(self, outputs, inputs, opts=None) -> dist.Work: ...

    @abstractmethod
    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None) -> dist.Work: ...

    def allreduce_coalesced(self, tensors: list[Tensor], opts=None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def all_gather_single(self, output: Tensor, x: Tensor, opts=None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [x], opts)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts=None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes=None, input_sizes=None, opts=None
    ) -> dist.Work:
        n = self.size()
        return self.alltoall(rows(output, output_sizes, n), rows(x, input_sizes, n), opts)

    # names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None) -> dist.Work:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None) -> dist.Work:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)
