"""Stages of transformers' own causal language models, cut along tensor, and their weights.

A stage is built on the meta device, staged by `decoder_stage`, and its layers are replaced by split
ones, as the table of its family says; then each rank makes what it holds, and nothing more.
transformers, of the extra `hf`, is imported on first use.

Under sequence parallelism the blocks hand on this rank's part of the sequence. Before and behind
them nothing changes: the first block takes its part of the embedded sequence, and the last one's
result is joined for the norm and the head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import DataError
from torchdistpackage.lazy import resolve
from torchdistpackage.models import transformers_meta
from torchdistpackage.models.transformers_4bit import read_packed, weights_to_pack
from torchdistpackage.models.transformers_adapters import with_adapters
from torchdistpackage.models.transformers_cache import TransformersCache
from torchdistpackage.models.transformers_experts import (
    expert_group,
    mesh_index_of,
    router_load,
    router_loss_sum,
    share_experts,
)
from torchdistpackage.models.transformers_folder import folder_of
from torchdistpackage.models.transformers_init import ModuleDraws
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    buffers,
    documents_by,
    global_name,
    layouts,
    split_table,
    weights,
)
from torchdistpackage.models.transformers_meta import (
    ALONE,
    check_packages,
    parameters_on_meta,
    refused,
)
from torchdistpackage.models.transformers_parameters import check_shapes, materialize
from torchdistpackage.models.transformers_staged import neighbours
from torchdistpackage.models.transformers_vocab import SplitVocab
from torchdistpackage.models.transformers_weights import fill
from torchdistpackage.parallel.auto.draws import (
    ShardDraws,
    default_draw,
    draw_apart,
    draws_as,
    may_draw,
)
from torchdistpackage.parallel.context.hugging_face import attend_over, inputs_of
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.pipeline.partition.hf_decoder import DecoderStage, decoder_stage
from torchdistpackage.parallel.tensor.attention import SequenceAttention, document_mask
from torchdistpackage.parallel.tensor.init import Initial, initialize
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.parallel.tensor.parallelize import parallelize

IGNORE = -100
Outputs = Tensor | tuple[Tensor, Tensor]
"""Activations or logits; (logits, auxiliary loss) of a model that counts that of its routers, or
(logits, what `router_load` says) if ranks can share its experts."""


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
        sequence: SequenceAttention | None = None,
    ):
        super().__init__()
        self._sequence = sequence if isinstance(sequence, ContextSequence) else None
        self.decoder, self.shape, self.axis = decoder, shape, axis
        self._group, self._stage_of = group, stage_of
        is_whole = group is None or not shape.kind.splits_head
        self._vocab = None if is_whole else SplitVocab(group, shape.vocab)
        self._auxiliary = shape.kind.auxiliary
        self._routers = {"output_router_logits": True} if self._auxiliary else {}
        self._top_k = shape.kind.top_k if shape.kind.shared_experts else 0
        self._cached: dict[str, Any] = {}
        self.to_pack: dict[str, str] = {}
        """Local name -> global name of weights in 4 bits, on meta until a folder is read."""
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

    def buffer_layouts(self) -> Layouts:
        """By name here, of the buffers that checkpoints hold."""
        known = buffers(self.shape, self._stage_of)
        named = ((name, name.removeprefix("decoder.")) for name, _ in self.named_buffers())
        return {name: known[key] for name, key in named if key in known}

    def initials(self) -> dict[str, Initial]:
        """What parameters start as, as transformers has it."""
        whole = weights(self.shape, self._stage_of, self.axis)
        pairs = [(name, key, whole[key]) for name, key in self.global_names().items()]
        drawn = [(name, key) for name, key, w in pairs if w.kind == "made"]
        found = {
            name: Initial(w.kind, w.std or 0.02, w.zero_row)
            for name, _, w in pairs
            if w.kind != "made"
        }
        if drawn:
            draws = ModuleDraws(self.shape.given, self.shape.kind)
            found |= {n: Initial("made", make=partial(draws.parameter, key)) for n, key in drawn}
        return {name: found[name] for name, _, _ in pairs}

    def block_names(self) -> tuple[str, ...]:
        """Of the blocks, for recomputation; none where there is no list of them."""
        if not self.shape.kind.blocks:
            return ()
        path = f"decoder.{self.shape.kind.blocks}"
        return tuple(f"{path}.{name}" for name, _ in self.get_submodule(path).named_children())

    def may_recompute(self, name: str) -> bool:
        """Whether this module draws the same when it alone is computed again.

        Where ranks draw together (dropout) only blocks do.
        """
        return not self._draws or name in self.block_names()

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Outputs:
        """ids (B, S) int64 on the first stage, else activations (B, S, D); activations, or from the
        last stage logits (B, S, V/n), of the columns of this rank, with the auxiliary loss of its
        routers if config.json asks for that (output_router_logits). S are the tokens of this rank.

        position_ids (B, S) int64 of whole sequences: from 0 in each document of a sample; no token
        sees another.
        """
        mask = None
        by = None if position_ids is None else documents_by(self.shape)
        if by in ("distances", "not"):
            raise DataError(
                f"the data has position_ids, but {self.shape.family} counts distances (ALiBi) "
                f"across a sample; return ids and targets alone"
            )
        if by == "mask":
            assert position_ids is not None
            mask = document_mask(position_ids)
        if self._sequence is not None:
            num = x.shape[1] * (1 if x.dim() == 2 else self.decoder.num_shares)
            mask, position_ids = inputs_of(self._sequence, num, position_ids, x.device)
        rank = 0 if self._group is None else self._group.rank()
        draws = self._draws and self.training
        with ShardDraws(rank, default_draw) if draws else nullcontext():
            if isinstance(self.decoder, DecoderStage):  # refused where routers have a loss
                given = {"attention_mask": mask, "position_ids": position_ids}
                return self.decoder(x, **(given | self._cached))
            # of what has no table, not all take positions
            given = {} if self._sequence is None else {"position_ids": position_ids}
            given |= self._routers | self._cached
            output = self.decoder(input_ids=x, return_dict=True, **given)
        if not self._routers:
            return output.logits
        if self._top_k:
            return output.logits, router_load(output.router_logits, self._top_k)
        return output.logits, output.aux_loss

    def loss(
        self, outputs: Outputs, targets: Tensor, ignore_index: int = IGNORE
    ) -> tuple[Tensor, Tensor]:
        """(sum of the tokens' losses, number of tokens counted).

        outputs: logits (B, S, V/n) as `forward` gives them; targets (B, S) int64, the tokens that
        follow: transformers' labels, shifted by one. The auxiliary loss of routers counts as often
        as there are tokens, so that it is added to their mean as transformers adds it.
        """
        logits, count = _logits(outputs), (targets != ignore_index).sum()
        if self._vocab is not None:
            total = self._vocab.loss_sum(logits, targets, ignore_index)
        else:
            total = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum"
            )
        if isinstance(outputs, tuple) and self._top_k:
            load = router_loss_sum(outputs[1], count, self._top_k)
            total = total + self._auxiliary * load.to(total)
        elif isinstance(outputs, tuple):
            # count first, as an integer times a Python float would be float32
            total = total + self._auxiliary * (count * outputs[1].to(total))
        return total, count

    def whole_logits(self, outputs: Outputs) -> Tensor:
        """Logits (..., V), equal over the group, from those (..., V/n) of `forward`."""
        logits = _logits(outputs)
        return logits if self._vocab is None else self._vocab.join(logits)

    def make_cache(self) -> "StageTokens | None":
        """Of keys and values, for one batch; None where transformers' cache does not serve it."""
        if self.shape.sequence_parallel or self._sequence is not None:
            return None
        num = self.shape.sizes.layers
        is_staged = isinstance(self.decoder, DecoderStage) and len(self.block_names()) < num
        around = self.shape.kind.sides if is_staged else None
        can, takes_padding = resolve(self.shape.kind.cache)(self.shape.given, around)
        return StageTokens(self, takes_padding) if can else None

    def logits_at(self, outputs: Outputs, position: int) -> Tensor:
        """Those (V,) of one position of the first sample, equal over the group.

        outputs: logits (B, S, V/n) as `forward` gives them.
        """
        return self.whole_logits(_logits(outputs)[0, position])


class StageTokens:
    """A cache of `TransformersStage`: what `GPTCache` is to our GPT."""

    def __init__(self, made: TransformersStage, takes_padding: bool):
        names = made.block_names()
        first = int(names[0].rpartition(".")[2]) if names else 0
        self._made, self._cache = made, TransformersCache(made.decoder, first)
        self.takes_padding = takes_padding and self._cache.takes_padding

    @contextmanager
    def call(self, num: int, padding: Tensor | None) -> Iterator[None]:
        """A forward inside is of `num` more tokens of each row."""
        with self._cache.call(num, padding) as self._made._cached:
            try:
                yield
            finally:
                self._made._cached = {}


def _logits(outputs: Outputs) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def stage(
    shape: TransformersShape,
    *,
    pieces: range | None = None,
    stage_of: Sequence[int] | None = None,
    group: Group | None = None,
    axis: str = "tensor",
    dropout: float = 0.0,
    tp_comm_overlap: bool = False,
    sequence: SequenceAttention | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> TransformersStage:
    """The blocks `pieces` of a model, default all, cut over the ranks of `group` along `axis`.

    dropout: has to be 0, as config.json has the rates. tp_comm_overlap: see `ColumnLinear`.
    sequence: attends over the sequence, of which this rank may hold a part.

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
    for path in shape.kind.unreached:  # a tower of images, where texts are read
        model.get_submodule(path).requires_grad_(False)
    sides = shape.kind.sides
    # the model itself need not be able to go on from activations, but documents need a stage
    if pieces == all_blocks and shape.kind.documents == "not":
        decoder = model
    else:
        decoder = decoder_stage(model, pieces, sides and neighbours(model, sides))
    if group is not None and num > 1:
        table = split_table(shape, axis)
        parallelize(decoder, table, group, axis=axis, tp_comm_overlap=tp_comm_overlap)
        draw_apart(decoder, table, shape.kind.blocks if shape.sequence_parallel else "")
        if shape.sequence_parallel:
            decoder.share_sequences(group)
    if isinstance(sequence, ContextSequence):
        attend_over(decoder, sequence)
    experts = expert_group()
    if shape.kind.shared_experts and experts is not None:
        known = layouts(shape, axis=axis)
        share_experts(decoder, known, experts, group if num > 1 else None)
    made = TransformersStage(decoder, shape, group if num > 1 else None, axis, stage_of, sequence)
    check_shapes(made, *mesh_index_of(group, axis))
    if shape.packed:
        made.to_pack = weights_to_pack(made, shape)
    materialize(made, device, {made.get_parameter(name) for name in made.to_pack})
    return made


def on_meta(shape: TransformersShape, dtype: torch.dtype | None = None) -> Any:
    """The whole model of transformers, its parameters on the meta device, its buffers made.

    Raises:
        NotAvailableError: transformers is not installed, or too old.
        ConfigError: it refuses these settings.
    """
    check_packages(
        *(() if shape.lora is None else ("peft",)), *(("bitsandbytes",) if shape.packed else ())
    )
    dtype = dtype or torch.get_default_dtype()
    with ALONE:
        model = transformers_meta.on_meta(shape.given, dtype)
        if shape.lora is None:
            return model
        try:
            with parameters_on_meta():
                return with_adapters(model, shape, shape.lora, dtype)
        except (ValueError, KeyError, TypeError, AssertionError, ImportError) as error:
            raise refused(error) from error


def load_weights(made: TransformersStage, folder: str | Path) -> None:
    """Overwrite the parameters of a stage, but for adapters, with those of `folder`.

    File by file; of each tensor a rank reads its own part. Values are converted to the parameters'
    type.

    Raises:
        CheckpointError: the folder has not exactly the weights of this model, as `open_folder`.
    """
    mesh, index = mesh_index_of(made._group, made.axis)
    device = next(p.device for p in made.parameters() if not p.is_meta)
    layouts = made.layouts() | made.buffer_layouts()
    tensors = dict(made.named_parameters()) | dict(made.named_buffers())
    opened = folder_of(made.shape).open(folder)
    left = fill(opened, tensors, layouts, mesh, index)
    read_packed(
        made,
        mesh,
        index,
        device,
        lambda name, x, wide: fill(opened, {name: wide}, {name: x}, mesh, index),
    )
    if left:
        drawn = {name: x for name, x in made.initials().items() if name in left}
        initialize(made, layouts, mesh, index, 0, drawn)
