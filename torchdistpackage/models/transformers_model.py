"""Stages of transformers' own causal language models, cut along tensor, and their weights.

A stage is built on the meta device, staged by `decoder_stage`, and its layers are replaced by split
ones, as the table of its family says; then each rank makes what it holds, and nothing more.
transformers, of the extra `hf`, is imported on first use.

Under sequence parallelism the blocks hand on this rank's part of the sequence. Before and behind
them nothing changes: the first block takes its part of the embedded sequence, and the last one's
result is joined for the norm and the head.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.config.hugging_face import with_earlier_rope
from torchdistpackage.config.model_section import is_adapter
from torchdistpackage.config.packages import is_before, too_old
from torchdistpackage.errors import ConfigError, DataError, LayoutError, NotAvailableError
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.mark import mark_of, mark_parameter
from torchdistpackage.layout.table import SplitTable
from torchdistpackage.models.hugging_face_folder import read_weights
from torchdistpackage.models.hugging_face_layout import Source
from torchdistpackage.models.lora_layout import Lora
from torchdistpackage.models.transformers_folder import open_folder
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    documents_by,
    global_name,
    split_table,
    weights,
)
from torchdistpackage.models.transformers_vocab import SplitVocab
from torchdistpackage.parallel.auto.draws import (
    ShardDraws,
    default_draw,
    draws_as,
    mark_alike,
    mark_split,
    may_draw,
)
from torchdistpackage.parallel.pipeline.partition.hf_decoder import decoder_stage
from torchdistpackage.parallel.tensor.attention import document_mask
from torchdistpackage.parallel.tensor.init import Initial
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.parallel.tensor.parallelize import parallelize
from torchdistpackage.topology.mesh import Mesh

IGNORE = -100
_SHOWN = 6
_ALONE = threading.Lock()
"""Of threads as ranks one makes a model at a time: transformers imports parts of itself meanwhile,
which threads cannot do side by side, and sets the process's default type.
"""


class TransformersStage(nn.Module):
    """Blocks of a decoder on one rank; the first stage embeds, the last makes logits.

    Made by `stage`. Weights are there but hold nothing until they are drawn or read.
    """

    def __init__(
        self,
        decoder: nn.Module,
        shape: TransformersShape,
        group: Group | None,
        axis: str,
        stage_of: Sequence[int] | None,
    ):
        super().__init__()
        self.decoder, self.shape, self.axis = decoder, shape, axis
        self._group, self._stage_of = group, stage_of
        self._vocab = None if group is None else SplitVocab(group, shape.vocab)
        self._draws = group is not None and may_draw(decoder, is_known=True)
        if group is not None and self._draws:
            draws_as(map(self.get_submodule, self.block_names()), group.rank())

    def global_names(self) -> dict[str, str]:
        """Name of each parameter -> its global name."""
        return {
            name: global_name(self.shape, name.removeprefix("decoder."))
            for name, _ in self.named_parameters()
        }

    def layouts(self) -> Layouts:
        """By name here."""
        whole = weights(self.shape, self._stage_of, self.axis)
        return {name: whole[key].layout for name, key in self.global_names().items()}

    def initials(self) -> dict[str, Initial]:
        """What parameters start as, as transformers has it."""
        whole = weights(self.shape, self._stage_of, self.axis)
        pairs = ((name, whole[key]) for name, key in self.global_names().items())
        return {name: Initial(w.kind, w.std or 0.02, w.zero_row) for name, w in pairs}

    def block_names(self) -> tuple[str, ...]:
        """Of the blocks, for recomputation."""
        path = f"decoder.{self.shape.kind.blocks}"
        return tuple(f"{path}.{name}" for name, _ in self.get_submodule(path).named_children())

    def may_recompute(self, name: str) -> bool:
        """Whether this module draws the same when it alone is computed again.

        Where ranks draw together (dropout) only blocks do.
        """
        return not self._draws or name in self.block_names()

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """ids (B, S) int64 on the first stage, else activations (B, S, D); activations, or from the
        last stage logits (B, S, V/n), of the columns of this rank.

        position_ids (B, S) int64: from 0 in each document of a sample; no token sees another.
        """
        mask = None
        by = None if position_ids is None else documents_by(self.shape)
        if by == "not":
            raise DataError(
                f"the data has position_ids, but {self.shape.family} counts distances (ALiBi) "
                f"across a sample; return ids and targets alone"
            )
        if by == "mask":
            assert position_ids is not None
            mask = document_mask(position_ids)
        rank = 0 if self._group is None else self._group.rank()
        draws = self._draws and self.training
        with ShardDraws(rank, default_draw) if draws else nullcontext():
            return self.decoder(x, attention_mask=mask, position_ids=position_ids)

    def loss(
        self, logits: Tensor, targets: Tensor, ignore_index: int = IGNORE
    ) -> tuple[Tensor, Tensor]:
        """(sum of the tokens' losses, number of tokens counted).

        logits (B, S, V/n) as `forward` gives them; targets (B, S) int64, the tokens that follow:
        transformers' labels, shifted by one.
        """
        if self._vocab is not None:
            total = self._vocab.loss_sum(logits, targets, ignore_index)
        else:
            total = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum"
            )
        return total, (targets != ignore_index).sum()

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits (..., V), equal over the group, from those (..., V/n) of `forward`."""
        return logits if self._vocab is None else self._vocab.join(logits)

    def logits_at(self, logits: Tensor, position: int) -> Tensor:
        """Those (V,) of one position of the first sample, equal over the group.

        logits (B, S, V/n) as `forward` gives them.
        """
        return self.whole_logits(logits[0, position])


def stage(
    shape: TransformersShape,
    *,
    pieces: range | None = None,
    stage_of: Sequence[int] | None = None,
    group: Group | None = None,
    axis: str = "tensor",
    dropout: float = 0.0,
    tp_comm_overlap: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> TransformersStage:
    """The blocks `pieces` of a model, default all, cut over the ranks of `group` along `axis`.

    dropout: has to be 0, as config.json has the rates. tp_comm_overlap: see `ColumnLinear`.

    Raises:
        NotAvailableError: transformers is not installed, or too old.
        ConfigError: it refuses these settings.
        LayoutError: the ranks cannot share the heads, or transformers builds other parameters than
            this package knows of.
    """
    assert not dropout
    device = torch.device("cpu" if device is None else device)
    model, num = on_meta(shape, dtype), 1 if group is None else group.size()
    all_blocks = range(shape.sizes.layers)
    pieces = all_blocks if pieces is None else pieces
    decoder = decoder_stage(model, pieces)
    if group is not None and num > 1:
        table = split_table(shape, axis)
        parallelize(decoder, table, group, axis=axis, tp_comm_overlap=tp_comm_overlap)
        _draw_apart(decoder, shape, table)
        if shape.sequence_parallel:
            decoder.share_sequences(num)
            _split_between(decoder.get_submodule(shape.kind.blocks), pieces, all_blocks, group)
    made = TransformersStage(decoder, shape, group if num > 1 else None, axis, stage_of)
    index = 0 if group is None else group.rank()
    _check_shapes(made, Mesh(((axis, num),)), index)
    _materialize(made, device)
    return made


def on_meta(shape: TransformersShape, dtype: torch.dtype | None = None) -> Any:
    """The whole model of transformers, its parameters on the meta device, its buffers made.

    Raises:
        NotAvailableError: transformers is not installed, or too old.
        ConfigError: it refuses these settings.
    """
    with _ALONE:
        return _on_meta(shape, dtype or torch.get_default_dtype())


def _on_meta(shape: TransformersShape, dtype: torch.dtype) -> Any:
    try:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        if shape.lora is not None:
            import peft  # noqa: F401
    except ImportError as error:
        raise NotAvailableError(
            f"model.hf needs transformers, and model.lora peft; install the extra hf: "
            f'pip install "torchdistpackage[hf]" ({error})'
        ) from error
    packages = ("transformers",) if shape.lora is None else ("transformers", "peft")
    if old := [text for package in packages if (text := too_old(package)) is not None]:
        raise NotAvailableError(f"model.hf {'; '.join(old)}")
    try:
        given = dict(shape.given)
        if is_before("transformers", "5"):
            given = with_earlier_rope(given)
        config = CONFIG_MAPPING[shape.family].from_dict(given)
        config.use_cache = False
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            return model if shape.lora is None else _with_adapters(model, shape, shape.lora, dtype)
    except (ValueError, KeyError, TypeError, AssertionError, ImportError) as error:
        raise ConfigError(f"transformers refuses the config.json of model.hf: {error!r}") from error


def _with_adapters(
    model: nn.Module, shape: TransformersShape, lora: Lora, dtype: torch.dtype
) -> nn.Module:
    """`model` with peft's layers around those that are adapted, whose weights alone train."""
    from peft import LoraConfig, inject_adapter_in_model

    known = weights(shape)
    layers = {name.rpartition(".lora_")[0]: name for name in known if is_adapter(name)}
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # of which it takes any number
        lora_dropout=lora.dropout,
        target_modules=list(layers),
        fan_in_fan_out=any(known[f"{layer}.weight"].inputs == 0 for layer in layers),
    )
    model = inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):  # which peft leaves as they are on the meta device
            parameter.data = parameter.data.to(dtype)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters there; of buffers the values would be lost."""
    thread = threading.get_ident()  # the hook is called in all of them

    def moved(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return parameter
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(moved)
    try:
        yield
    finally:
        handle.remove()


def _draw_apart(decoder: nn.Module, shape: TransformersShape, table: SplitTable) -> None:
    """Let dropout differ between ranks where each has a part: of heads, of what row layers with
    adapters are given, and under sequence parallelism everywhere in the blocks."""
    blocks = re.compile(rf"{re.escape(shape.kind.blocks)}\.\d+")
    for name, module in decoder.named_modules():
        adapted = table.layers.get(name.rpartition(".lora_dropout.")[0])
        if name in table.attention or (adapted is not None and adapted.kind == "row"):
            mark_split(module)
        elif adapted is not None:
            mark_alike(module)
        elif shape.sequence_parallel and blocks.fullmatch(name):
            mark_split(module, everything=True)


def _split_between(blocks: nn.Module, here: range, all_blocks: range, group: Group) -> None:
    """Let the first of all blocks take this rank's part of the sequence, and join behind the last.

    here: those of this stage.
    """
    modules = list(blocks.children())

    def take_part(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        part = collectives.scatter(x, 1, group)
        return ((part, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": part})

    def join(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (join(module, args, output[0]), *output[1:])
        return collectives.gather(output, 1, group)

    if here.start == all_blocks.start:
        modules[0].register_forward_pre_hook(take_part, with_kwargs=True)
    if here.stop == all_blocks.stop:
        modules[-1].register_forward_hook(join)


def _check_shapes(made: TransformersStage, mesh: Mesh, index: int) -> None:
    """Raises LayoutError where transformers' parameters are not those of the layouts."""
    known = weights(made.shape, None, made.axis)
    problems: list[str] = []
    parameters = dict(made.named_parameters())
    for name, key in made.global_names().items():
        if key not in known:
            problems.append(f"{key} is not known")
            continue
        has, wants = tuple(parameters[name].shape), local_shape(known[key].layout, mesh, index)
        if has != wants:
            problems.append(f"{key} has shape {has}, not {wants}")
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise LayoutError(
            f"this release of transformers builds another {made.shape.family} than the one known "
            f"here: {'; '.join(problems[:_SHOWN])}{more}; use model.target for this model"
        )


def _materialize(made: nn.Module, device: torch.device) -> None:
    """Put parameters, without values, and buffers on `device`; what is shared stays so."""
    known: dict[int, nn.Parameter] = {}
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in known:
                empty = torch.empty_like(parameter, device=device)
                known[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                if (mark := mark_of(parameter)) is not None:
                    mark_parameter(known[id(parameter)], mark.layout, mark.group, mark.depth)
            module._parameters[name] = known[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def load_weights(made: TransformersStage, folder: str | Path) -> None:
    """Overwrite the parameters of a stage, but for adapters, with those of `folder`.

    File by file; of each tensor a rank reads its own part. Values are converted to the parameters'
    type.

    Raises:
        CheckpointError: the folder has not exactly the weights of this model, as `open_folder`.
    """
    found, group = open_folder(folder, made.shape), made._group
    mesh, index = Mesh(((made.axis, 1),)), 0
    if group is not None:
        mesh, index = Mesh(((made.axis, group.size()),)), group.rank()
    layouts = made.layouts()
    read = [(layouts[name], parameter) for name, parameter in made.named_parameters()]
    read = [(layout, parameter) for layout, parameter in read if not is_adapter(layout.name)]
    made_of = {layout.name: (Source(layout.name, layout.shape),) for layout, _ in read}
    read_weights(found, made_of, read, mesh, index)
