"""Resolution of NaiveDDP's options: planner, sparse gradients, hooks, checks of replicas.

NaiveDDP imports this file. The reducer does not: it gets the objects made here as its
`ReducerParts`. So a reader who follows a gradient meets an option only where it is set.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass

import torch
from torch import nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.groups import for_each_group
from torchdistpackage.comm.primitives import ranks_of
from torchdistpackage.comm.transport.hierarchical import hierarchical_all_reduce
from torchdistpackage.ddp import param_sync
from torchdistpackage.ddp.bucket_comm import AllReduceBucket, BucketComm, CommHook, ReducerParts
from torchdistpackage.ddp.bucket_plan import MIB, Bucket, BucketSizes, bucket_sizes
from torchdistpackage.ddp.bucket_tuning import BucketTuner
from torchdistpackage.ddp.comm_hooks import narrowed
from torchdistpackage.ddp.param_spec import ParamSpec, batch_group
from torchdistpackage.ddp.scheduled_ready import LastBackwardPolicy
from torchdistpackage.ddp.sparse_grads import SparseGrad, mark_sparse

_LOG = logging.getLogger(__name__)


@dataclass
class ResolvedOptions:
    """The options of one NaiveDDP and of its copies, including unpickled ones.

    plans: whether measurements decide the order and sizes of buckets.
    given_bytes: size of a bucket; 0: decided by measurement.
    mean: whether gradients are averaged. Other fields are as in NaiveDDP.
    """

    module: InitVar[nn.Module]
    reduce_op: str
    bucket_cap_mb: float | None
    num_grad_acc_iter: int
    plans: bool
    strict: bool
    comm_hook: CommHook
    fp32_grads: bool
    reduce_dtype: torch.dtype | None
    _by_node: dict[tuple[int, ...], CommHook] | None = None

    verify_params_match = staticmethod(param_sync.verify_params_match)
    sync_module_states = staticmethod(param_sync.sync_module_states)

    def __post_init__(self, module: nn.Module) -> None:
        """Raise ValueError with all invalid options."""
        problems = common_problems(
            module, self.reduce_op, self.bucket_cap_mb, self.num_grad_acc_iter
        )
        if not callable(getattr(self.comm_hook, "bind", self.comm_hook)):
            problems.append(f"comm_hook is {self.comm_hook!r}; use one of ddp/comm_hooks.py")
        problems += dtype_problems({"reduce_dtype": self.reduce_dtype})
        if self.reduce_dtype is not None and self._has_own_hook:
            problems.append(
                f"reduce_dtype is {self.reduce_dtype}, but comm_hook {self.comm_hook} decides how "
                f"gradients are sent; give one of the two"
            )
        refuse(problems)

    @property
    def _has_own_hook(self) -> bool:
        return self.comm_hook is not primitives.start_all_reduce

    @property
    def mean(self) -> bool:
        return self.reduce_op.lower() == "avg"

    @property
    def given_bytes(self) -> int:
        return int((self.bucket_cap_mb or 0) * MIB)

    @property
    def cap_bytes(self) -> int:
        return self.given_bytes or _sizes().default_bytes

    def prepare(
        self, module: nn.Module, specs: Sequence[ParamSpec]
    ) -> tuple[list[ParamSpec], ReducerParts]:
        """Return the parameters in the form to be reduced, and the reducer's parts.

        The first call is collective if a group has four ranks or more.
        """
        marked = mark_sparse(module, specs)
        if self._by_node is None:
            self._by_node = _hooks_by_node(marked)
            self._log(type(module).__name__, marked)
        tuner = None
        if self.plans and any(s.is_early for s in marked):
            candidates_bytes = () if self.given_bytes else _sizes().candidates_bytes
            tuner = BucketTuner(marked, self.cap_bytes, candidates_bytes)
        return marked, ReducerParts(
            make_bucket_comm=self._make_bucket_comm,
            planner=tuner,
            check_used=param_sync.check_unused_parameters if self.strict else None,
            scheduled_ready=LastBackwardPolicy,
        )

    def __getstate__(self) -> dict[str, object]:
        """Leave out the hooks by node: they hold groups, which cannot be pickled."""
        return {**vars(self), "_by_node": None}

    def _make_bucket_comm(self, bucket: Bucket, members: Sequence[ParamSpec]) -> BucketComm:
        """Create the communication of a bucket, with the hook of its group."""
        if members[0].sparse_rows:
            return SparseGrad(members[0])
        hook = self.comm_hook
        if not self._has_own_hook:
            hook = (self._by_node or {}).get(ranks_of(members[0].group), hook)
            hook = hook if self.reduce_dtype is None else narrowed(self.reduce_dtype, hook)
        return AllReduceBucket(bucket, members, hook=hook, keep_wide=self.fp32_grads)

    def _log(self, name: str, specs: Sequence[ParamSpec]) -> None:
        """Log the options that change what gradients cost or how they travel."""
        wider = [s for s in specs if s.is_wider]
        if wider:
            dtype = str(wider[0].parameter.dtype).removeprefix("torch.")
            cast = f"cast to {dtype} (fp32_grads=True keeps it)"
            _LOG.info(
                "%s: gradients of %d %s elements are summed in fp32, 4 bytes each; .grad is %s",
                name,
                sum(s.parameter.numel() for s in wider),
                dtype,
                "fp32 too" if self.fp32_grads else cast,
            )
        if self.reduce_dtype is not None:
            _LOG.info("%s: gradients travel as %s", name, self.reduce_dtype)
        if self._has_own_hook:
            _LOG.info("%s: gradients are sent as the hook %s makes them", name, self.comm_hook)
            if self._by_node:
                # A hook that wraps the default one looks like any other hook, so it is not replaced
                # by node: all ranks must end with what this hook computes.
                _LOG.info(
                    "%s: over ranks %s this replaces the default hook, an all-reduce by node",
                    name,
                    " and ".join(map(str, self._by_node)),
                )


def common_problems(
    module: object, reduce_op: object, bucket_cap_mb: object, num_grad_acc_iter: object
) -> list[str]:
    """Return a sentence for each mistake in the arguments that NaiveDDP and ZeroOptimizer share."""
    problems: list[str] = []
    if not isinstance(module, nn.Module):
        problems.append(f"module is of type {type(module).__name__}; give a torch.nn.Module")
    problems += reduce_op_problems(reduce_op)
    is_number = isinstance(bucket_cap_mb, int | float) and bucket_cap_mb >= 0
    if bucket_cap_mb is not None and not is_number:
        problems.append(f"bucket_cap_mb is {bucket_cap_mb!r}; give a number of MiB, or None")
    if not isinstance(num_grad_acc_iter, int) or num_grad_acc_iter < 1:
        problems.append(
            f"num_grad_acc_iter is {num_grad_acc_iter!r}; give a whole number of 1 or more"
        )
    return problems


def dtype_problems(dtypes: Mapping[str, object]) -> list[str]:
    """Return a sentence for each of these options that is neither a float dtype nor None."""
    return [
        f"{name} is {dtype!r}; give a torch.dtype of floats, or None"
        for name, dtype in dtypes.items()
        if dtype is not None and not getattr(dtype, "is_floating_point", False)
    ]


def reduce_op_problems(reduce_op: object) -> list[str]:
    """Return a sentence if `reduce_op` is neither "avg" nor "sum"."""
    if isinstance(reduce_op, str) and reduce_op.lower() in ("avg", "sum"):
        return []
    return [f"reduce_op is {reduce_op!r}; use 'avg' or 'sum'"]


def refuse(problems: Sequence[str]) -> None:
    """Raise ValueError with the problems, if there are any."""
    if problems:
        raise ValueError("; ".join(problems))


def _sizes() -> BucketSizes:
    """Return the bucket sizes for the world group's transport and the size of the batch group."""
    return bucket_sizes(queued=primitives.is_queued(world()), num_ranks=batch_group().size())


def _hooks_by_node(specs: Sequence[ParamSpec]) -> dict[tuple[int, ...], CommHook]:
    """Return hooks for groups of at least two nodes with at least two ranks each; collective."""
    hooks = {
        ranks_of(group): hierarchical_all_reduce(group)
        for group, _ in for_each_group(specs, min_size=4)
    }
    return {ranks: start for ranks, start in hooks.items() if start is not None}
