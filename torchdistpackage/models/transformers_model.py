"""Stages of transformers' own causal language models, cut along tensor, and their weights.

A stage is built on the meta device, staged by `decoder_stage` and cut by the plan of its family in
parallel/auto; then each rank makes what it holds, and nothing more. Its parameters go by
transformers' names everywhere but in the module itself. transformers, of the extra `hf`, is
imported on first use.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchdistpackage.comm.primitives import Group
from torchdistpackage.config.hugging_face import with_earlier_rope
from torchdistpackage.config.model_section import is_adapter
from torchdistpackage.config.packages import is_before, too_old
from torchdistpackage.errors import ConfigError, DataError, LayoutError, NotAvailableError
from torchdistpackage.layout.derive import blocks, local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.lora_layout import Lora
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    documents_by,
    global_name,
    open_folder,
    weights,
)
from torchdistpackage.models.transformers_vocab import (
    SplitVocab,
    look_up_by_rows,
    split_by_vocab,
)
from torchdistpackage.parallel.auto.actions import FirstOnly
from torchdistpackage.parallel.auto.draws import ShardDraws, default_draw, draws_as, may_draw
from torchdistpackage.parallel.auto.families.registry import PREDEFINED_CONFIGS
from torchdistpackage.parallel.auto.rules import Config, add_lora_rules, state_action
from torchdistpackage.parallel.auto.shard import make_shard
from torchdistpackage.parallel.auto.wrapper import TensorParallelWrapper
from torchdistpackage.parallel.pipeline.partition.hf_decoder import SkippedModule, decoder_stage
from torchdistpackage.parallel.tensor.attention import document_mask
from torchdistpackage.parallel.tensor.init import Initial
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.topology.mesh import Mesh

IGNORE = -100
_WRAPPED = "tp_wrapped_module."
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
            name: global_name(self.shape, name.removeprefix("decoder.").replace(_WRAPPED, ""))
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

    dropout: has to be 0, as config.json has the rates. tp_comm_overlap: not for these modules.

    Raises:
        NotAvailableError: transformers is not installed, or too old.
        ConfigError: it refuses these settings.
        LayoutError: the ranks cannot share the heads, or transformers builds other parameters than
            this package knows of.
    """
    assert not dropout and not tp_comm_overlap
    device = torch.device("cpu" if device is None else device)
    model, num = on_meta(shape, dtype), 1 if group is None else group.size()
    all_blocks = range(shape.sizes.layers)
    decoder: nn.Module = decoder_stage(model, all_blocks if pieces is None else pieces)
    if group is not None and num > 1:
        plan = PREDEFINED_CONFIGS[shape.family](model.config, range(num))
        plan = add_lora_rules(decoder, split_by_vocab(plan, shape, num))
        bound = plan.create_collective_ops([device] * num, group=group)
        decoder, _ = make_shard(decoder, device, bound, rank=group.rank(), world_size=num)
        look_up_by_rows(decoder, shape, SplitVocab(group, shape.vocab))
        _unwrap_skipped(decoder)
        _add_biases_behind_sums(decoder, plan)
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


def _unwrap_skipped(shard: nn.Module) -> None:
    """What another stage runs has no parts to join."""
    for parent in list(shard.modules()):
        for name, child in parent._modules.items():
            inner = getattr(child, _WRAPPED[:-1], None)
            if isinstance(child, TensorParallelWrapper) and isinstance(inner, SkippedModule):
                parent._modules[name] = inner


def _add_biases_behind_sums(shard: nn.Module, plan: Config) -> None:
    """Let biases that a plan gives to one rank be whole on every rank, added behind the sum.

    Then all ranks have the bias and its gradient alike, as a layout can say.
    """
    for name, bias in list(shard.named_parameters()):
        action = state_action(plan, [name.replace(_WRAPPED, "")])
        if not isinstance(action, FirstOnly):
            continue
        path = name.rpartition(".")[0]
        wrapper = shard.get_submodule(path.rpartition(f".{_WRAPPED[:-1]}")[0])
        layer = shard.get_submodule(path)
        assert isinstance(wrapper, TensorParallelWrapper)
        layer.bias = None
        if not isinstance(layer, nn.Linear):  # transformers' Conv1D adds one always
            del layer._parameters["bias"]
            zeros = torch.zeros(bias.shape, dtype=bias.dtype)
            layer.register_buffer("bias", zeros, persistent=False)
        wrapper._parameters["bias"] = bias  # as an attribute the wrapper has the layer's
        wrapper.register_forward_hook(_add_bias)


def _add_bias(wrapper: nn.Module, args: object, output: Tensor) -> Tensor:
    bias: Any = wrapper.bias
    return output + bias.to(output.dtype)


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
            module._parameters[name] = known[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@torch.no_grad()
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
    layouts, by_file = made.layouts(), defaultdict[str, list[tuple[str, Layout, Tensor]]](list)
    for name, parameter in made.named_parameters():
        if is_adapter(layouts[name].name):
            continue
        file, key = found.places[layouts[name].name]
        by_file[file].append((key, layouts[name], parameter))
    for file, wanted in by_file.items():
        with safe_open(found.folder / file, framework="pt") as opened:
            for key, layout, parameter in wanted:
                part = opened.get_slice(key)
                for where, here in blocks(layout, mesh, index):
                    parameter[here].copy_(part[where])
