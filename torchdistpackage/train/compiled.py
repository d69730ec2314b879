"""`train.compile`: each block of a rank's stages becomes one graph, compiled before the first step.

Blocks of one class share what is compiled: parameters are inputs of a graph, so a second block
finds the first one's. Ranks compile the same blocks: a graph calls other collectives than eager
code. A compiled block is its own call (`nn.Module.compile`), so hooks of ZeRO stand around it, and
recomputation is in the graph. Torch keeps graphs in a folder of each rank: on one node beside the
run's, where a job that is requeued reads them, and on several nodes on a disk of the node.
"""

import atexit
import os
import shutil
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from torchdistpackage.comm import primitives
from torchdistpackage.errors import ConfigError
from torchdistpackage.files import own_folder
from torchdistpackage.tools.undisturbed import undisturbed
from torchdistpackage.train.recompute import block_names
from torchdistpackage.train.staged_model import TrainStages
from torchdistpackage.train.step import Trainer

if TYPE_CHECKING:  # torch loads it when it is asked for: who only builds a run saves two seconds
    import torch._dynamo.exc
    import torch._dynamo.utils

_CACHE_KEY = "TORCHINDUCTOR_CACHE_DIR"
CACHE = ".compiled"
"""Folder beside the run folders of one node, which share it unless TORCHINDUCTOR_CACHE_DIR names
another."""
_REASON_LINES = 6


class CompiledBlock:
    """Calls a block as one graph.

    falls_back: a block that cannot be compiled runs eagerly, with the reason in `refused`;
    otherwise that is an error. is_tried: it runs eagerly, and the first call only finds out whether
    it can be traced.
    """

    def __init__(self, name: str, module: nn.Module, backend: str, falls_back: bool):
        self.name, self.kind = name, type(module).__name__
        self.refused, self.is_on, self.is_tried = "", True, False
        self.around: Callable[..., Any] | None = None
        self._module, self.falls_back = module, falls_back
        self._run = _compiled(type(module), backend)
        self._trace = _compiled(type(module), _traced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.around is None:
            return self._call(*args, **kwargs)
        return self.around(self._call, *args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on or self.refused:
            return self._module._call_impl(*args, **kwargs)
        if self.is_tried:
            self._try(args, kwargs)
            return self._module._call_impl(*args, **kwargs)
        try:
            return self._run(self._module, *args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
            raise ConfigError(
                f"train.compile: {self.name} ({self.kind}) gets inputs of changing shapes, now "
                f"{shapes}, and each shape needs a graph of its own; give all samples one length "
                f"(data.seq_len), or set train.compile=off: {_reason(error)}"
            ) from error
        except torch._dynamo.exc.TorchDynamoException as error:
            if not self.falls_back:
                raise ConfigError(
                    f"train.compile=blocks: {self.name} ({self.kind}) cannot be compiled to one "
                    f"graph: {_reason(error)}; fix that, set train.compile to auto, which leaves "
                    "such blocks uncompiled, or to off"
                ) from error
            self.refused = _reason(error)
            return self._module._call_impl(*args, **kwargs)

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace a call without computing or sending anything."""
        try:
            self._trace(self._module, *args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _IsTraced):
                self.refused = _reason(error)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.refused = _reason(error)


def compile_blocks(stages: TrainStages, backend: str, mode: str = "blocks") -> list[CompiledBlock]:
    """Make every block (`block_names`) run as one graph. Call it before ZeRO hooks the blocks.

    mode: `train.compile`; with off nothing is compiled.

    Raises:
        ConfigError: the stages have no block, or one has hooks that its graph would contain.
    """
    if mode == "off":
        return []
    falls_back, names = mode == "auto", block_names(stages)
    blocks = {name: stages.get_submodule(name) for name in names}
    hooked = {
        name: sorted({type(m).__name__ for m in block.modules() if _has_hooks(m)})
        for name, block in blocks.items()
    }
    watched = [f"{name} ({', '.join(kinds)})" for name, kinds in hooked.items() if kinds]
    if watched and not falls_back:
        raise ConfigError(
            f"train.compile=blocks: {len(watched)} of {len(blocks)} blocks have forward or "
            f"backward hooks inside, such as a debugger's, which would be compiled with them: "
            f"{', '.join(watched[:3])}; remove the hooks, or set train.compile=off"
        )
    wrapped: list[CompiledBlock] = []
    for name, block in blocks.items():
        wrapped.append(CompiledBlock(name, block, backend, falls_back))
        if hooked[name]:
            wrapped[-1].refused = f"it has hooks inside: {', '.join(hooked[name])}"
        block._compiled_call_impl = wrapped[-1]
    stages.compiled += wrapped
    return wrapped


def warm_up(trainer: Trainer, step: int) -> str:
    """Compile everything that step `step` needs, with a forward and backward that leave no effects.

    Collective over the entire run; return lines about it. Seconds are those of the slowest rank,
    and count for no step.
    """
    began = time.monotonic()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings(), undisturbed(trainer.stage), trainer.reducer.no_sync():
        # dynamo looks at the gradients of what it is given, activations too
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
        if trainer.optimizer is not None:
            trainer.optimizer.zero_grad()
        trainer.stage.train()
        _agree(trainer, step)
        trainer.accumulate(step, reduce=False)
        if trainer.optimizer is not None:
            trainer.optimizer.zero_grad()
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    num_cached = counters["aot_autograd"]["autograd_cache_hit"]
    blocks = trainer.stage.compiled
    refused = [f"{x.name} ({x.kind}): {x.refused}" for x in blocks if x.refused]
    took_s = time.monotonic() - began
    summary = _WarmUp(len(blocks), len(refused), graphs, num_cached, took_s, refused[:1])
    return str(primitives.reduce_objects(summary, _compiled_line))


class _WarmUp(NamedTuple):
    """The blocks that one rank compiled. refused: the first block that stays eager, with the
    reason.
    """

    num_blocks: int
    num_eager: int
    num_graphs: int
    num_cached: int
    took_s: float
    refused: list[str]


def _compiled_line(ranks: list[Any]) -> str:
    """Return a line about the blocks that all ranks have compiled."""
    num_eager = sum(rank.num_eager for rank in ranks)
    graphs = sum(rank.num_graphs for rank in ranks)
    num_cached = sum(rank.num_cached for rank in ranks)
    num_compiled = sum(rank.num_blocks for rank in ranks) - num_eager
    text = f"{num_compiled} block{'s' * (num_compiled != 1)} in {graphs} graph{'s' * (graphs != 1)}"
    text += f", {num_cached} of them read from {cache_folder()}"
    line = f"compiled {text}: {max(rank.took_s for rank in ranks):.1f} s before the first step"
    first = next((rank.refused[0] for rank in ranks if rank.refused), None)
    return (
        line if first is None else f"{line}; {num_eager} blocks are as they were, such as {first}"
    )


def _agree(trainer: Trainer, step: int) -> None:
    """Leave a block uncompiled on all ranks if any rank cannot compile it, if blocks may stay
    uncompiled.

    A rank that fell back alone would issue other collectives than its peers' graphs.
    """
    blocks = [block for block in trainer.stage.compiled if block.falls_back]
    if not primitives.reduce_objects(bool(blocks), any):
        return
    for block in blocks:
        block.is_tried = True
    trainer.accumulate(step, reduce=False)
    local_refusals = {block.name: block.refused for block in blocks if block.refused}
    refused = cast(dict[str, str], primitives.reduce_objects(local_refusals, _refused_on))
    for block in blocks:
        block.is_tried = False
        if block.name in refused and not block.refused:
            block.refused = refused[block.name]


def _refused_on(refusals_of_ranks: list[Any]) -> dict[str, str]:
    """Return for each block which rank first refused it, and why."""
    refusals: dict[str, str] = {}
    for rank, refused in enumerate(refusals_of_ranks):
        for name, why in refused.items():
            refusals.setdefault(name, f"rank {rank} cannot compile it: {why}")
    return refusals


@contextmanager
def run_eagerly(blocks: Sequence[CompiledBlock]) -> Iterator[None]:
    """Run these blocks uncompiled inside the block, for hooks on modules within them."""
    for block in blocks:
        block.is_on = False
    try:
        yield
    finally:
        for block in blocks:
            block.is_on = True


def use_cache(run: Path, rank: int, *, several_nodes: bool = False) -> None:
    """Make torch keep graphs separately from those of other ranks, which would otherwise write the
    same files at once.

    They are beside the run folder, or on a disk of the node if there are several nodes. A cache has
    thousands of small files, and those of many ranks exhaust the file quota of a shared disk
    (pytorch#196993) or are stale there (pytorch#173679).
    """
    # late: a run that compiles nothing does not wait for inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    named = os.environ.get(_CACHE_KEY)
    # torch itself sets it to its default, which may be gone on the next node
    is_named = named is not None and named != default_cache_dir()
    if named and is_named:
        root = Path(named)
    else:
        root = node_cache() if several_nodes else run.absolute().parent / CACHE
    rank_folder = root / f"torch-{torch.__version__}" / f"rank{rank}"
    os.environ[_CACHE_KEY] = str(rank_folder)
    os.environ.setdefault("TRITON_CACHE_DIR", str(rank_folder / "triton"))


def node_cache() -> Path:
    """Return a folder on a disk of this node. Only its owner may write there, because torch loads
    code from it.
    """
    if (folder := own_folder()) is not None:
        return folder / "compiled"
    # another user has taken its name: a folder of this start alone
    path = Path(tempfile.mkdtemp(prefix="tdp-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def end_compile_workers() -> None:
    """End the processes and threads that compile, for which the end of a rank would otherwise
    wait.
    """
    from torch._inductor import async_compile

    async_compile.shutdown_compile_workers()
    if async_compile.AsyncCompile.pool.cache_info().currsize:
        async_compile.AsyncCompile.pool().shutdown()
        async_compile.AsyncCompile.pool.cache_clear()


def cache_folder() -> str:
    """Return the folder for the graphs of all ranks."""
    return (
        str(Path(os.environ[_CACHE_KEY]).parent)
        if _CACHE_KEY in os.environ
        else "the cache of torch"
    )


class _IsTraced(Exception):
    """Raised when a call could be traced to its end."""


def _traced(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
    """Raise `_IsTraced`: a back end that compiles nothing."""
    raise _IsTraced


_calls: dict[tuple[type, Any], Any] = {}


def _compiled(kind: type[nn.Module], backend: Any) -> Any:
    """Return the compiled callable of all modules of one class, with its own graphs.

    Torch limits the number of graphs per code object, and `nn.Module._call_impl` is shared by all
    modules.
    """
    if (kind, backend) not in _calls:

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        code = call.__code__.replace(co_name=f"call_{kind.__name__}")
        function = types.FunctionType(code, globals(), code.co_name)
        chosen = _aot_eager if backend == "aot_eager" else backend
        _calls[kind, backend] = torch.compile(
            function, backend=chosen, fullgraph=True, dynamic=False
        )
    return _calls[kind, backend]


def _aot_eager(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Compile as torch's back end of this name, but for softplus_backward.

    Torch (2.13) traces it with other strides than its kernel returns, so that a view of its result
    stops the backward of gated delta nets.
    """
    from torch._decomp import get_decompositions
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
        decompositions=get_decompositions([torch.ops.aten.softplus_backward]),
    )(graph, inputs)


def _has_hooks(module: nn.Module) -> bool:
    hook_dicts = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    prefix = "torchdistpackage."
    return any(
        not str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(prefix)
        for hooks in hook_dicts
        for hook in hooks.values()
    )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:_REASON_LINES])
