"""NaiveDDP: data parallelism for any module, in Python, overlapped with the backward.

The wrapper equalises parameters and buffers once, and hands every gradient to the reducer.
Nothing needs to be called after `loss.backward()`; it returns with reduced gradients.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.comm.transport import hierarchical
from torchdistpackage.ddp.bucket_comm import AllReduceBucket, BucketComm
from torchdistpackage.ddp.bucket_plan import MIB, Bucket, bucket_sizes
from torchdistpackage.ddp.bucket_tuning import BucketTuner
from torchdistpackage.ddp.comm_hooks import CommHook
from torchdistpackage.ddp.embedding_rows import Embeddings
from torchdistpackage.ddp.grad_hooks import refuse_sharded, tensors_in
from torchdistpackage.ddp.param_spec import (
    ParamSpec,
    layouts_of,
    num_batches,
    refuse_cut,
    summed_over,
)
from torchdistpackage.ddp.param_sync import (
    ReplicatedTensor,
    by_group,
    sync_module_states,
    verify_params_match,
)
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.wrapper_state import ModuleWatch, Wrapper
from torchdistpackage.errors import CommError
from torchdistpackage.layout.layout import Layout

SMALLEST_BY_NODE = 4
"""Two nodes with two ranks each."""
_LOG = logging.getLogger(__name__)


class NaiveDDP(Wrapper):
    """Wrap `module` so that gradients are averaged over the ranks that hold the same parameters.

    module: on its device already. It may use parameters differently on each rank, share them,
        freeze them, checkpoint (reentrant or not), and return any nest of tensors.
    sync: reduce at the end of the backward instead of during it.
    bucket_cap_mb: MiB of gradients that travel together; None: chosen from what the first steps
        show; until then 4, over NCCL 32.
    gradient_as_bucket_view: accepted for compatibility; `.grad` always is a view of its bucket.
    process_group: ranks that hold the same parameters; default tpc's data (and context) ranks,
        or everybody where tpc is not set up.
    dp_rank0: global rank whose values all start from; default the first of each group.
    reduce_op: "avg", or "sum" (then zero gradients every step).
    num_grad_acc_iter: reduce in every so manieth backward only, the pipeline's number of
        microbatches for example; those between accumulate.
    layouts: name -> Layout: over what gradients are summed (partial sums, tied stages), by tpc.
        Default: what the module's own layers say (docs/data_parallel.md). A parameter that is
        not listed counts as replicated over the group.
    strict: raise on all ranks, by name, when some rank leaves parameters unused.
    broadcast_buffers: before each training forward buffers follow the group's first rank.
    comm_hook: how buckets travel (comm_hooks.py); by default in full.
    fp32_grads: leave gradients of bf16 and fp16 parameters in fp32, in which they are summed, for
        an optimizer that takes them so, as torch's SGD, Muon and Adafactor do and its Adam and
        AdamW do not; else `.grad` is a copy in the parameter's dtype.
    keep_order: buckets as registered and of one size, not as gradients are seen to come, so that
        the calls of a step are those of a plan on paper.
    embedding_rows: gradients of lookups in `nn.Embedding` travel as rows, where these are few.
        Such a lookup cannot be differentiated twice. CPU only.

    Parameters that the module gains later, or that are no longer frozen, are taken in at the next
    forward, on all ranks. Those frozen or removed later count as unused until `refresh()`.
    A deep copy, or one from a pickle, reduces on its own, over the same ranks.
    Those in `module._ddp_params_and_buffers_to_ignore` are left alone. State dicts have its names.

    Raises:
        CommError: `dp_rank0` is not in a parameter's group, or modules differ between ranks; in
            a training forward: it returns no tensor; in a backward: this was dropped before it.
        LayoutError: layers cut parameters over ranks of the group.
        ValueError: `reduce_op` is neither "avg" nor "sum"; `embedding_rows` on a device.
    """

    _of_this_process = ("_group", "_by_node", "_reducer", "_module_watch", "_embeddings")
    _shared_by_copies = ("_group", "_by_node", "_comm_hook")
    _reducer: Reducer | None = None
    _module_watch: ModuleWatch | None = None
    _embeddings: Embeddings | None = None
    _by_node: dict[tuple[int, ...], CommHook] | None = None

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
        embedding_rows: bool = False,
    ):
        super().__init__(module, process_group)
        if reduce_op.lower() not in ("avg", "sum"):
            raise ValueError(f"reduce_op is {reduce_op!r}; use 'avg' or 'sum'")
        self.source, self.broadcast_buffers = dp_rank0, broadcast_buffers
        self._mean = reduce_op.lower() == "avg"
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._cap_bytes = None if bucket_cap_mb is None else int(bucket_cap_mb * MIB)
        self._num_backwards, self._overlap, self._strict = num_grad_acc_iter, not sync, strict
        self._comm_hook, self._fp32_grads, self._keep_order = comm_hook, fp32_grads, keep_order
        self._embedding_rows, self._verbose, self._by_node = embedding_rows, verbose, None
        self._given = layouts
        self._read_layouts()
        verify_params_match(self.replicas())
        self.broadcast_params()
        self._start()

    def forward(self, *args, **kwargs):
        if self._reducer is None:
            self._start()
        elif self._module_watch.has_changed():
            self.refresh()
        follows = self.broadcast_buffers and self.training and self._module_watch.has_buffers()
        if follows and not self._reducer.held:
            self.follow_buffers()
        outputs = self.module(*args, **kwargs)
        if self.training and torch.is_grad_enabled() and not self._reducer.held:
            self._check_reachable(outputs)
        return self._reducer.watch(outputs)

    def _check_reachable(self, outputs: object) -> None:
        """No backward could be seen to come if there were no tensor to hook."""
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
        """Owns the gradients; `hold` and `release` are `no_sync` without a block."""
        if self._reducer is None:
            self._start()
        return self._reducer

    def refresh(self) -> None:
        """Own the parameters that the module has now; the new ones start from the first rank's.

        Collective. Only after parameters were frozen or removed must it be called by hand.
        """
        known = {id(parameter) for parameter in self.reducer.parameters}
        self._read_layouts()
        replicas = self.replicas()
        verify_params_match(replicas)
        sync_module_states((r for r in replicas if id(r.tensor) not in known), self.source)
        self._start()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of forwards made inside only accumulate."""
        with self.reducer.no_sync():
            yield

    def reduce_gradients(self) -> None:
        """Reduce whatever has not been. Needed only where a backward never met the outputs of
        this wrapper, because its module was called directly; harmless otherwise."""
        self.reducer.finish()

    sync_comm = reduce_gradients

    def broadcast_params(self) -> None:
        """Set parameters and buffers, frozen ones too, to those of their group's first rank."""
        sync_module_states(self.replicas(), self.source)

    def follow_buffers(self) -> None:
        """Set buffers to those of global rank `source`, by default the group's first."""
        sync_module_states(self._own_buffers(), self.source)

    def replicas(self) -> list[ReplicatedTensor]:
        """What ranks hold alike, by the names of layouts: parameters, frozen too, and buffers."""
        own, names = self._own_parameters(), {n: x.name for n, x in self._layouts.items()}
        found = [ReplicatedTensor(names.get(n, n), p, self._get_group(n, p)) for n, p in own]
        return found + self._own_buffers()

    # -- what is reduced, and how ----------------------------------------------------------

    def _start(self) -> None:
        """Make the reducer, or let it own what there is now."""
        if self._embeddings is not None:
            self._embeddings.remove()
        trained = (self._share(n, p) for n, p in self._own_parameters() if p.requires_grad)
        shared = [s for s in trained if _must_be_owned(s)]
        refuse_sharded(shared)
        me = ref(self)  # hooks of embeddings stay when this goes, and must not keep it
        self._embeddings = Embeddings(
            self.module,
            shared,
            lookups=self._embedding_rows,
            counts=lambda: (ddp := me()) is not None and ddp.reducer.is_reducing,
        )
        shared, after = self._embeddings.shared, self._embeddings.after
        if self._by_node is None:
            self._by_node = _ways_by_node(shared)
        sizes = bucket_sizes(queued=primitives.is_queued(world()))
        tuner, cap_bytes = None, self._cap_bytes or sizes.default_bytes
        if not self._keep_order and self._overlap and any(s.is_early for s in shared):
            candidates_bytes = () if self._cap_bytes else sizes.candidates_bytes
            tuner = BucketTuner(shared, cap_bytes, candidates_bytes)
        self._module_watch = ModuleWatch(self.module)
        make = partial(
            _make_bucket_comm, self._embeddings, self._comm_hook, self._by_node, self._fp32_grads
        )
        if self._reducer is not None:
            self._reducer.renew(shared, make_bucket_comm=make, after=after, tuner=tuner)
            return
        self._reducer = Reducer(
            shared,
            cap_bytes=cap_bytes,
            num_backwards=self._num_backwards,
            overlap=self._overlap,
            strict=self._strict,
            make_bucket_comm=make,
            after=after,
            tuner=tuner,
        )
        self._log(shared)

    def _log(self, shared: Sequence[ParamSpec]) -> None:
        name = type(self.module).__name__
        if self._verbose:
            _LOG.info("%s: %d buckets", name, self._reducer.num_buckets)
        wider = [s for s in shared if s.is_wider]
        if wider:
            dtype = str(wider[0].parameter.dtype).removeprefix("torch.")
            kept = "fp32 too" if self._fp32_grads else f"cast to {dtype} (fp32_grads=True keeps it)"
            _LOG.info(
                "%s: gradients of %d %s elements are summed in fp32, 4 bytes each; .grad is %s",
                *(name, sum(s.parameter.numel() for s in wider), dtype, kept),
            )
        if self._comm_hook is not primitives.start_all_reduce:
            _LOG.info("%s: gradients travel as %s has them", name, self._comm_hook)

    def _read_layouts(self) -> None:
        own = self._own_parameters()
        self._layouts = layouts_of(self.module, own, self._given, self._ranks_given)
        if self._layouts:
            tpc.prepare(sums=self._layouts.values())
        for named in ((n, p) for n, p in own if n not in self._layouts):
            refuse_cut([named], ranks_of(self._get_group(*named)), "NaiveDDP")

    def _get_group(self, name: str, parameter: nn.Parameter) -> Group:
        """Ranks over which this gradient is summed. Override to choose for each parameter."""
        layout = self._layouts.get(name)
        ranks = None if layout is None else summed_over(layout)
        return self.group if ranks in (None, ranks_of(self.group)) else tpc.groups.of(ranks)

    def _share(self, name: str, parameter: nn.Parameter) -> ParamSpec:
        group = self._get_group(name, parameter)
        layout = self._layouts.get(name)
        divide, is_tied = group.size(), layout is not None and len(layout.stages) > 1
        if layout is not None and ranks_of(group) == summed_over(layout):
            divide = num_batches(layout)
        return ParamSpec(name, parameter, group, divide if self._mean else 1, deferred=is_tied)

    def _own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.module.named_parameters() if n not in self._ignored]

    def _own_buffers(self) -> list[ReplicatedTensor]:
        held = self.module.named_buffers()
        return [ReplicatedTensor(n, b, self.group) for n, b in held if n not in self._ignored]


def _make_bucket_comm(
    embeddings: Embeddings,
    hook: CommHook,
    by_node: Mapping[tuple[int, ...], CommHook],
    keep_wide: bool,
    bucket: Bucket,
    members: Sequence[ParamSpec],
) -> BucketComm:
    if members[0].sparse_rows:
        return embeddings.make_bucket_comm(members[0])
    if hook is primitives.start_all_reduce:
        hook = by_node.get(ranks_of(members[0].group), hook)
    return AllReduceBucket(bucket, members, hook=hook, keep_wide=keep_wide)


def _must_be_owned(shared: ParamSpec) -> bool:
    """Alone, gradients are what autograd makes, unless they must be added up in more bits."""
    return shared.group.size() > 1 or shared.is_wider


def _ways_by_node(shared: Sequence[ParamSpec]) -> dict[tuple[int, ...], CommHook]:
    """How buckets of those groups travel whose nodes have several ranks each; collective."""
    found = {
        ranks_of(group): hierarchical.hierarchical_all_reduce(group)
        for group, _ in by_group(shared, SMALLEST_BY_NODE)
    }
    return {ranks: start for ranks, start in found.items() if start is not None}
