"""NaiveDDP: data parallelism for any module, in Python, overlapped with the backward.

The wrapper makes parameters and buffers equal once, and gives every gradient to the reducer.
`loss.backward()` returns with reduced gradients; the caller need not call anything after it.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.bucket_comm import CommHook
from torchdistpackage.ddp.grad_hooks import hooked_names, tensors_in
from torchdistpackage.ddp.options import ResolvedOptions
from torchdistpackage.ddp.param_spec import (
    ParamSpec,
    ReplicatedTensor,
    layouts_of,
    refuse_cut,
    sum_group,
)
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.wrapper_state import ModuleWatch, Wrapper
from torchdistpackage.errors import CommError
from torchdistpackage.layout.layout import Layout

_LOG = logging.getLogger(__name__)


class NaiveDDP(Wrapper):
    """Wrap `module` so that gradients are averaged over the ranks that hold the same parameters.

    module: on its device. It may use parameters differently on each rank, share and freeze them,
        checkpoint activations (reentrant or not), and return tensors in any nested structure.
    sync: reduce at the end of the backward instead of during it.
    bucket_cap_mb: size of a bucket in MiB. None: chosen by measurement in the first steps; until
        then 4, or 32 over NCCL.
    gradient_as_bucket_view: accepted for compatibility; `.grad` always is a view of its bucket.
    process_group: ranks that hold the same parameters; default: tpc's data (and context) ranks, or
        all ranks if tpc is not set up.
    dp_rank0: global rank whose values are broadcast at the start; default: the group's first.
    reduce_op: "avg", or "sum" (then zero gradients every step).
    num_grad_acc_iter: reduce only in every n-th backward, for example n micro-batches; the other
        backwards accumulate.
    layouts: name -> Layout, with the axes of tpc over which gradients are summed (partial sums,
        tied stages). Default: the layouts of the module's layers (docs/data_parallel.md). A
        parameter that is not listed counts as replicated over the group.
    strict: raise on all ranks, naming parameters that some rank left unused.
    broadcast_buffers: broadcast buffers from the group's first rank before a training forward.
    reduce_dtype: dtype in which gradients are sent and summed over ranks, such as torch.bfloat16;
        default: the dtype in which this rank accumulates them.
    comm_hook: communication hook (comm_hooks.py) to use instead of the all-reduce.
    fp32_grads: leave gradients of bf16 and fp16 parameters in fp32, in which they are summed.
        torch's SGD, Muon and Adafactor accept that, but Adam and AdamW do not. By default `.grad`
        is a copy in the parameter's dtype.
    keep_order: keep buckets in the order of registration and at their size, so that every step
        makes the same calls. By default they are rebuilt in the order of the gradients.

    Parameters that the module gains later, or that are no longer frozen, are added at the next
    forward, on all ranks. Those frozen or removed later count as unused until `refresh()`.
    A deep copy or unpickled copy has its own reducer over the same ranks. Names in
    `module._ddp_params_and_buffers_to_ignore` are not touched. State dicts have the module's names.

    Raises:
        CommError: `dp_rank0` is not in a parameter's group, or modules differ between ranks. A
            training forward raises it if it returns no tensor. A backward raises it if the wrapper
            was dropped and this is not the first backward of its graph, or the graph was compiled.
        LayoutError: layers split parameters over ranks of the group.
        ValueError: invalid options, all of them.
    """

    _of_this_process = ("_group", "_reducer", "_module_watch")
    _shared_by_copies = ("_group", "_options")
    _reducer: Reducer | None = None
    _module_watch: ModuleWatch | None = None

    def __init__(
        self,
        module: nn.Module,
        sync: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        process_group: Group | None = None,
        dp_rank0: int | None = None,
        reduce_op: str = "avg",
        num_grad_acc_iter: int = 1,
        verbose: bool = False,
        layouts: Mapping[str, Layout] | None = None,
        *,
        strict: bool = False,
        broadcast_buffers: bool = True,
        comm_hook: CommHook = primitives.start_all_reduce,
        fp32_grads: bool = False,
        keep_order: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ):
        super().__init__(module, process_group)
        self.source, self.broadcast_buffers = dp_rank0, broadcast_buffers
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._num_grad_acc_iter, self._overlap = num_grad_acc_iter, not sync
        self._verbose, self._given = verbose, layouts
        self._options = ResolvedOptions(
            module,
            reduce_op=reduce_op,
            bucket_cap_mb=bucket_cap_mb,
            num_grad_acc_iter=num_grad_acc_iter,
            plans=not (sync or keep_order),
            strict=strict,
            comm_hook=comm_hook,
            fp32_grads=fp32_grads,
            reduce_dtype=reduce_dtype,
        )
        self._read_layouts()
        self._options.verify_params_match(self.replicas())
        self.broadcast_params()
        self._start()

    def forward(self, *args, **kwargs):
        if self._reducer is None:
            self._start()
        elif self._module_watch.has_changed():
            self.refresh()
        follows = self.broadcast_buffers and self.training and self._module_watch.has_buffers()
        if follows and not self._reducer.only_accumulates:
            self.follow_buffers()
        outputs = self.module(*args, **kwargs)
        if self.training and torch.is_grad_enabled() and not self._reducer.only_accumulates:
            self._check_reachable(outputs)
        return self._reducer.watch(outputs, survives=True)

    def _check_reachable(self, outputs: object) -> None:
        """Refuse outputs without a tensor: no hook could tell that a backward begins."""
        if isinstance(outputs, Tensor) or not self._reducer.parameters or tensors_in(outputs):
            return
        raise CommError(
            f"the forward of {type(self.module).__name__} returned {type(outputs).__name__}, in "
            f"which NaiveDDP finds no tensor, so that no backward would reduce; return tuples, "
            f"lists, dicts or dataclasses of tensors, or call it under no_sync() and "
            f"reduce_gradients() after the backward"
        )

    @property
    def reducer(self) -> Reducer:
        """The reducer that owns the gradients; its `hold` and `release` are `no_sync` in
        two calls.
        """
        if self._reducer is None:
            self._start()
        return self._reducer

    def refresh(self) -> None:
        """Own the parameters that the module has now; set new ones to the first rank's values.

        All ranks call it together. It is needed only after parameters were frozen or removed.
        """
        owned_ids = set(map(id, self.reducer.parameters))
        self._read_layouts()
        replicas = self.replicas()
        self._options.verify_params_match(replicas)
        new = [r for r in replicas if id(r.tensor) not in owned_ids]
        self._options.sync_module_states(new, self.source)
        self._start()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards of forwards made in this block accumulate gradients without reducing."""
        return self.reducer.no_sync()

    def reduce_gradients(self) -> None:
        """Reduce gradients that are not reduced yet.

        It is needed only after backwards of the bare module's outputs.
        """
        self.reducer.finish()

    sync_comm = reduce_gradients

    def broadcast_params(self) -> None:
        """Set parameters and buffers, frozen ones too, to those of their group's first rank."""
        self._options.sync_module_states(self.replicas(), self.source)

    def follow_buffers(self) -> None:
        """Set buffers to those of global rank `source`, by default the group's first."""
        self._options.sync_module_states(self._own_buffers(), self.source)

    def replicas(self) -> list[ReplicatedTensor]:
        """Return replicated parameters, frozen ones too, and buffers, by the names of layouts."""
        names = {n: x.name for n, x in self._layouts.items()}
        parameters = [
            ReplicatedTensor(names.get(n, n), p, self._get_group(n, p))
            for n, p in self._own_parameters()
        ]
        return parameters + self._own_buffers()

    def _start(self) -> None:
        """Create the reducer, or give it the parameters that the module has now."""
        specs = [self._share(n, p) for n, p in self._own_parameters() if p.requires_grad]
        # On one rank autograd's gradients are final, except those to accumulate in fp32, and those
        # of experts, which are divided because they saw the tokens of several batches.
        specs = [s for s in specs if s.group.size() > 1 or s.divide > 1 or s.is_wider]
        if names := hooked_names(specs, exclusive=True):
            raise CommError(
                f"{len(names)} of {len(specs)} parameters belong to a ZeroOptimizer, which "
                f"reduces their gradients itself: {', '.join(names[:3])}; train the module without "
                f"NaiveDDP, or call the remove() of that optimizer first"
            )
        specs, parts = self._options.prepare(self.module, specs)
        self._module_watch = ModuleWatch(self.module)
        if self._reducer is not None:
            self._reducer.renew(specs, parts)
            return
        self._reducer = Reducer(
            specs,
            cap_bytes=self._options.cap_bytes,
            num_backwards=self._num_grad_acc_iter,
            overlap=self._overlap,
            parts=parts,
        )
        if self._verbose:
            _LOG.info("%s: %d buckets", type(self.module).__name__, self._reducer.num_buckets)

    def _read_layouts(self) -> None:
        """Find the layouts of the parameters, and refuse parameters that the group cuts."""
        parameters = self._own_parameters()
        self._layouts = layouts_of(self.module, parameters, self._given, self._ranks_given)
        if self._layouts:
            tpc.prepare(sums=self._layouts.values())
        for named in ((n, p) for n, p in parameters if n not in self._layouts):
            refuse_cut([named], ranks_of(self._get_group(*named)), "NaiveDDP")

    def _get_group(self, name: str, parameter: nn.Parameter) -> Group:
        """Return the ranks over which this gradient is summed. A subclass may override it."""
        return sum_group(self._layouts.get(name), self.group)

    def _share(self, name: str, parameter: nn.Parameter) -> ParamSpec:
        """Return the spec of a parameter, with its group and divisor."""
        group, layout = self._get_group(name, parameter), self._layouts.get(name)
        return ParamSpec.from_layout(name, parameter, layout, group, mean=self._options.mean)

    def _own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the module's parameters, except ignored ones."""
        return [(n, p) for n, p in self.module.named_parameters() if n not in self._ignored]

    def _own_buffers(self) -> list[ReplicatedTensor]:
        """Return the module's buffers, except ignored ones."""
        buffers = self.module.named_buffers()
        return [ReplicatedTensor(n, b, self.group) for n, b in buffers if n not in self._ignored]
