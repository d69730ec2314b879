"""NaiveDDP: data parallelism for any module, in Python, overlapped with the backward.

The wrapper equalises parameters and buffers once, and hands every gradient to the reducer.
Nothing needs to be called after `loss.backward()`; it returns with reduced gradients.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.shared import Shared
from torchdistpackage.layout.derive import BATCH_AXES, gradient_ranks, num_replicas
from torchdistpackage.layout.layout import Layout

MIB = 2**20
_LOG = logging.getLogger(__name__)


class NaiveDDP(nn.Module):
    """Wrap `module` so that gradients are averaged over the ranks that hold the same parameters.

    module: on its device already. It may use parameters differently on each rank, share them,
        freeze them, checkpoint (reentrant or not), and return any nest of tensors.
    sync: reduce at the end of the backward instead of during it.
    bucket_cap_mb: MiB of gradients that travel together. On slow links 4 overlaps better.
    gradient_as_bucket_view: accepted for compatibility; `.grad` always is a view of its bucket.
    process_group: ranks that hold the same parameters; default tpc's data (and context) ranks,
        or everybody where tpc is not set up.
    dp_rank0: global rank whose values all start from; default the first of each group.
    reduce_op: "avg", or "sum" (then zero gradients every step).
    num_grad_acc_iter: reduce in every so manieth backward only, the pipeline's number of
        microbatches for example; those between accumulate.
    layouts: for parallel modules, name -> Layout; gradients are then summed over what each
        layout says (partial sums, tied stages) and `tpc` must be set up. Parameters it does
        not list count as replicated over the group.
    strict: raise on all ranks, by name, when some rank leaves parameters unused.
    broadcast_buffers: before each training forward buffers follow the group's first rank.

    Parameters in `module._ddp_params_and_buffers_to_ignore` are left alone. `state_dict` and
    `load_state_dict` use the module's own names.

    Raises:
        CommError: `dp_rank0` is not in a parameter's group.
        ValueError: `reduce_op` is neither "avg" nor "sum".
    """

    def __init__(
        self,
        module: nn.Module,
        sync: bool = False,
        bucket_cap_mb: float = 25,
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
    ):
        super().__init__()
        if reduce_op.lower() not in ("avg", "sum"):
            raise ValueError(f"reduce_op is {reduce_op!r}; use 'avg' or 'sum'")
        self.module = module
        self._mean = reduce_op.lower() == "avg"
        self._layouts = dict(layouts or {})
        self._group = process_group if process_group is not None else _batch_group()
        self._source = dp_rank0
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._broadcast_buffers = broadcast_buffers
        self.register_state_dict_post_hook(_strip)
        self.register_load_state_dict_pre_hook(_add)
        if self._layouts:
            tpc.groups.prepare(map(self._ranks, self._layouts.values()))
        self.broadcast_params()
        self.reducer = Reducer(
            [self._share(name, p) for name, p in self._own_parameters() if p.requires_grad],
            cap_bytes=int(bucket_cap_mb * MIB),
            num_backwards=num_grad_acc_iter,
            overlap=not sync,
            strict=strict,
        )
        if verbose:
            _LOG.info("%s: %d buckets", type(module).__name__, self.reducer.num_buckets)

    def forward(self, *args, **kwargs):
        if self._broadcast_buffers and self.training and not self.reducer.held:
            self._follow_buffers()
        return self.reducer.watch(self.module(*args, **kwargs))

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
        with torch.no_grad():
            for name, parameter in self._own_parameters():
                self._equalise(parameter.data, self._get_group(name, parameter))
            for name, buffer in self.module.named_buffers():
                if name not in self._ignored:
                    self._equalise(buffer, self._group)

    def _get_group(self, name: str, parameter: nn.Parameter) -> Group:
        """Ranks over which this gradient is summed. Override to choose for each parameter."""
        layout = self._layouts.get(name)
        if layout is None:
            return self._group
        return tpc.groups.of(self._ranks(layout))

    @staticmethod
    def _ranks(layout: Layout) -> tuple[int, ...]:
        return gradient_ranks(layout, tpc.topology.view(layout.view), tpc.rank)

    def _share(self, name: str, parameter: nn.Parameter) -> Shared:
        group = self._get_group(name, parameter)
        layout = self._layouts.get(name)
        if not self._mean:
            divide = 1
        elif layout is None:
            divide = group.size()
        else:
            divide = num_replicas(layout, tpc.topology.view(layout.view))
        return Shared(name, parameter, group, divide, last=_is_tied(layout))

    def _own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.module.named_parameters() if n not in self._ignored]

    def _equalise(self, x: Tensor, group: Group) -> None:
        if not x.numel():
            return
        if x.is_contiguous():
            primitives.broadcast(x, group, self._source)
        else:
            x.copy_(primitives.broadcast(x.contiguous(), group, self._source))

    def _follow_buffers(self) -> None:
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name not in self._ignored:
                    self._equalise(buffer, self._group)


def _is_tied(layout: Layout | None) -> bool:
    return layout is not None and len(layout.stages) > 1


def _batch_group() -> Group:
    """Ranks that see different tokens: tpc's data and context axes, else everybody."""
    if tpc.is_set:
        return tpc.groups.along(tpc.topology.dense, BATCH_AXES)
    return resolve_group(None, "data")


def _strip(module: nn.Module, state: dict[str, Tensor], prefix: str, local: dict) -> None:
    """The module's own names in `state_dict`, not those of the wrapper."""
    old = f"{prefix}module."
    for key in [key for key in state if key.startswith(old)]:
        state[prefix + key.removeprefix(old)] = state.pop(key)


def _add(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """The reverse of `_strip`, before loading."""
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    for name in own:
        plain = prefix + name.removeprefix("module.")
        if plain in state:
            state[prefix + name] = state.pop(plain)
