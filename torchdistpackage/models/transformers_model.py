"""Stages of transformers' own causal language models, split along tensor, and their weights.

`stage` builds one: transformers makes the model on the meta device, `decoder_stage` keeps the
blocks of this stage, split layers take the place of those that the table of the family names, and
then each rank makes the parameters that it holds, and nothing more. `load_weights` fills them from
a folder. transformers, of the extra `hf`, is imported on first use.

Under sequence parallelism the blocks hand on this rank's slice of the sequence. Before and behind
them nothing changes: the first block takes its slice of the embedded sequence, and the last one's
result is gathered for the norm and the head.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.nested import map_leaves
from torchdistpackage.comm.primitives import Group
from torchdistpackage.config.mtp import DEPTH
from torchdistpackage.errors import DataError, LayoutError
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.mark import mark_of, mark_parameter
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.lazy import resolve
from torchdistpackage.models import transformers_meta
from torchdistpackage.models.document_rows import DocumentRows
from torchdistpackage.models.lora_layout import ADAPTER_FILES, peft_names
from torchdistpackage.models.transformers_cache import TransformersCache
from torchdistpackage.models.transformers_calls import arguments_of
from torchdistpackage.models.transformers_dora import reset_magnitudes
from torchdistpackage.models.transformers_experts import (
    expert_group,
    mesh_index_of,
    router_load,
    router_loss_sum,
    share_experts,
)
from torchdistpackage.models.transformers_folder import folder_of
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    buffers,
    global_name,
    split_table,
    weights,
)
from torchdistpackage.models.transformers_layout import layouts as layouts_of
from torchdistpackage.models.transformers_lora import (
    read_adapters,
    read_packed,
    weights_to_pack,
    with_adapters,
)
from torchdistpackage.models.transformers_meta import (
    ALONE,
    ModuleDraws,
    check_packages,
    parameters_on_meta,
    refused,
)
from torchdistpackage.models.transformers_mtp import FurtherToken
from torchdistpackage.models.transformers_staged import neighbours
from torchdistpackage.models.transformers_tokens import adapt_tokens, reset_tokens
from torchdistpackage.models.transformers_weights import fill
from torchdistpackage.parallel.auto.draws import (
    ShardDraws,
    default_draw,
    draw_apart,
    draws_as,
    may_draw,
)
from torchdistpackage.parallel.context.hugging_face import attend_over, attending, inputs_of
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.pipeline.partition.hf_decoder import DecoderStage, decoder_stage
from torchdistpackage.parallel.pipeline.partition.side_inputs import Message, first_of
from torchdistpackage.parallel.tensor.attention import SequenceAttention, document_mask
from torchdistpackage.parallel.tensor.block_slices import let_see_all
from torchdistpackage.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from torchdistpackage.parallel.tensor.init import Initial, initialize
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.parallel.tensor.parallelize import parallelize
from torchdistpackage.topology.mesh import Mesh

IGNORE = -100
_SHOWN = 6
"""Largest number of parameters that an error lists."""
Outputs = Tensor | tuple[Tensor, ...]
"""Activations, in a tuple with what goes beside them, or logits; (logits, auxiliary loss) of a
model that counts that of its routers, or (logits, what `router_load` returns) if all ranks count it
together, or (logits, those of the token after the next one) in training of an MTP layer."""


# -- building a stage ------------------------------------------------------------------------------


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
) -> "TransformersStage":
    """Return the blocks `pieces` of a model, default all, split over `group` along `axis`.

    dropout: has to be 0, as config.json has the rates. tp_comm_overlap: see `ColumnLinear`.
    sequence: attends over the sequence, of which this rank may hold a slice.

    Raises:
        NotAvailableError: transformers is not installed, or too old.
        ConfigError: it refuses these settings.
        LayoutError: the ranks cannot share the heads, or transformers builds other parameters than
            this package knows of.
    """
    assert not dropout
    device = torch.device("cpu" if device is None else device)
    model = on_meta(shape, dtype)
    for path in shape.kind.unreached:  # a tower of images, where texts are read
        model.get_submodule(path).requires_grad_(False)
    takes = frozenset(arguments_of(model, {"position_ids": None, "use_cache": None}))
    slices_blocks = shape.sequence_parallel and not shape.has_table
    if slices_blocks and group is not None and group.size() > 1:
        # before the stage is cut, whose gates are to stand around them
        dim = shape.kind.sides.token_dim if shape.kind.sides else 1
        let_see_all(model.get_submodule(shape.kind.blocks), group, dim)
    decoder = _blocks_of(model, shape, range(shape.sizes.layers) if pieces is None else pieces)
    if group is not None and group.size() == 1:
        group = None
    if group is not None:
        table = split_table(shape, axis)
        parallelize(decoder, table, group, axis=axis, tp_comm_overlap=tp_comm_overlap)
        sliced = shape.sequence_parallel and shape.has_table
        draw_apart(decoder, table, shape.kind.blocks if sliced else "")
        if shape.sequence_parallel:
            decoder.share_sequences(group)
    if isinstance(sequence, ContextSequence):
        context_way = shape.context_way
        attend_over(
            decoder,
            sequence,
            context_way.attends,
            context_way.gathered,
            context_way.swaps,
            context_way.scanned,
        )
    experts = expert_group()
    if shape.kind.shared_experts and experts is not None:
        share_experts(decoder, layouts_of(shape, axis=axis), experts, group)
    if shape.lora is not None and shape.lora.trainable_token_indices:
        adapt_tokens(decoder, shape, group, axis)
    built = TransformersStage(decoder, shape, group, axis, stage_of, sequence)
    built.takes = takes
    _check_shapes(built, *mesh_index_of(group, axis))
    if shape.packed:
        built.to_pack = weights_to_pack(built, shape)
    _materialize(built, device, {built.get_parameter(name) for name in built.to_pack})
    return built


def on_meta(shape: TransformersShape, dtype: torch.dtype | None = None) -> Any:
    """Return the whole model of transformers, with its adapters, on the meta device.

    Buffers have their values.

    Raises:
        NotAvailableError: transformers is not installed, or too old.
        ConfigError: it refuses these settings.
    """
    check_packages(*(() if shape.lora is None else ("peft",)), *_packers(shape))
    dtype = dtype or torch.get_default_dtype()
    with ALONE:
        model = transformers_meta.on_meta(shape.given, dtype, head=shape.head)
        if shape.lora is None:
            return model
        try:
            with parameters_on_meta():
                return with_adapters(model, shape, shape.lora, dtype)
        except transformers_meta.settings_errors() as error:
            raise refused(error) from error


def _packers(shape: TransformersShape) -> tuple[str, ...]:
    """Return the packages that pack frozen weights."""
    packing = None if shape.lora is None else shape.lora.packing
    return ("bitsandbytes",) if packing is not None and packing.bits == 4 else ()


def _blocks_of(model: Any, shape: TransformersShape, pieces: range) -> Any:
    """Return the stage of `model` with the blocks `pieces`, or `model` if it is in one piece."""
    # a model need not be able to go on from activations, but masks of documents need a stage
    is_cut = len(pieces) != shape.sizes.layers or shape.sequence_parallel
    if not is_cut and shape.kind.documents in ("padding", "not"):
        return model
    sides = shape.kind.sides
    return decoder_stage(model, pieces, sides and neighbours(model, sides))


def _check_shapes(built: "TransformersStage", mesh: Mesh, index: int) -> None:
    """Raise LayoutError if transformers' parameters differ from the layouts."""
    listed = weights(built.shape, None, built.axis)
    problems: list[str] = []
    parameters = dict(built.named_parameters())
    for name, key in built.global_names().items():
        if key not in listed:
            problems.append(f"{key} is not known")
            continue
        shape, expected = parameters[name].shape, local_shape(listed[key].layout, mesh, index)
        if tuple(shape) != expected:
            problems.append(f"{key} has shape {tuple(shape)}, not {expected}")
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise LayoutError(
            f"this release of transformers builds another {built.shape.family} than the one known "
            f"here: {'; '.join(problems[:_SHOWN])}{more}; use model.target for this model"
        )


def _materialize(
    built: nn.Module, device: torch.device, unfilled: Container[nn.Parameter] = ()
) -> None:
    """Put parameters, without values, and buffers on `device`; tied parameters stay tied.

    unfilled: parameters that stay on the meta device.
    """
    materialized: dict[int, nn.Parameter] = {}
    for module in built.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or parameter in unfilled:
                continue
            if id(parameter) not in materialized:
                empty = torch.empty_like(parameter, device=device)
                materialized[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                if (mark := mark_of(parameter)) is not None:
                    mark_parameter(materialized[id(parameter)], mark.layout, mark.group, mark.depth)
            module._parameters[name] = materialized[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def load_weights(built: "TransformersStage", folder: str | Path) -> None:
    """Overwrite the parameters of a stage, but for adapters, with those of `folder`.

    It reads file by file, and only this rank's shard of each tensor. Values are converted to the
    parameters' type.

    Raises:
        CheckpointError: the folder does not have exactly the weights of this model, as in
            `open_folder`.
    """
    mesh, index = mesh_index_of(built._group, built.axis)
    device = next(p.device for p in built.parameters() if not p.is_meta)
    layouts = built.layouts() | built.buffer_layouts()
    tensors = dict(built.named_parameters()) | dict(built.named_buffers())
    opened = folder_of(built.shape).open(folder)
    left_out = fill(opened, tensors, layouts, mesh, index)
    read_packed(
        built,
        mesh,
        index,
        device,
        lambda name, x, values: fill(opened, {name: values}, {name: x}, mesh, index),
    )
    if left_out:
        initials = {name: x for name, x in built.initials().items() if name in left_out}
        initialize(built, layouts, mesh, index, 0, initials)
    lora = built.shape.lora
    if lora is not None and lora.use_dora:
        reset_magnitudes(built)
    if lora is not None and lora.trainable_token_indices:
        reset_tokens(built, built._group)
    if lora is not None and lora.adapter is not None:
        file = Path(lora.adapter) / ADAPTER_FILES.weights
        names = peft_names(layouts_of(built.shape))
        read_adapters(file, lora, names, tensors, layouts, mesh, index)


# -- a stage at work -------------------------------------------------------------------------------


class TransformersStage(nn.Module):
    """Blocks of a decoder on one rank; the first stage embeds, the last makes logits.

    `stage` makes it. Parameters hold nothing until they are drawn or read.
    group: tensor ranks that split it; None: one process has all of it.
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
        self.vocab_group = group if shape.kind.splits_head else None
        """Ranks that have logits of their own columns of the vocabulary; None: this has all."""
        self._auxiliary = shape.kind.auxiliary
        self._routers = {"output_router_logits": True} if self._auxiliary else {}
        self._top_k = shape.kind.top_k if shape.kind.counts_routers else 0
        self._cached: dict[str, Any] = {}
        self.takes: frozenset[str] = frozenset()
        """Keywords beside the mask that the forward of the whole class names."""
        self.to_pack: dict[str, str] = {}
        """Local name -> global name of weights in 4 bits, on meta until a folder is read."""
        self._further: FurtherToken | None = None
        if shape.mtp_loss:
            base: Any = decoder.base if isinstance(decoder, DecoderStage) else decoder
            base = base if hasattr(base, "layers") else base.model
            layers = shape.given[DEPTH]
            self._further = FurtherToken(base, _head_of(decoder), layers)
        self._returns_hidden, self._hidden = False, torch.empty(0)
        self._is_base = shape.head is not None and not shape.head.task.ending
        self._draws = group is not None and may_draw(decoder, is_known=True)
        if group is not None and self._draws:
            draws_as(map(self.get_submodule, self.block_names()), group.rank())

    def global_names(self) -> dict[str, str]:
        """Return the global name of each parameter, by its local name."""
        return {
            name: global_name(self.shape, name.removeprefix("decoder."))
            for name, _ in self.named_parameters()
        }

    def layouts(self) -> Layouts:
        """Return the layout of each parameter, by its name here."""
        listed = weights(self.shape, self._stage_of, self.axis)
        return {name: listed[key].layout for name, key in self.global_names().items()}

    def buffer_layouts(self) -> Layouts:
        """Return the layout of each buffer that checkpoints hold, by its name here."""
        by_name = buffers(self.shape, self._stage_of)
        names = ((name, name.removeprefix("decoder.")) for name, _ in self.named_buffers())
        return {name: by_name[key] for name, key in names if key in by_name}

    def initials(self) -> dict[str, Initial]:
        """Return the initial value of each parameter in transformers, by its local name."""
        listed = weights(self.shape, self._stage_of, self.axis)
        names = self.global_names()
        # drawing by modules makes the whole model once more, so only if it is asked for
        by_modules = any(listed[key].kind == "made" for key in names.values())
        draws = (
            ModuleDraws(self.shape.given, self.shape.kind, self.shape.head) if by_modules else None
        )
        initials: dict[str, Initial] = {}
        for name, key in names.items():
            w = listed[key]
            if w.kind in ("norms", "rows"):
                continue
            if w.kind == "made":
                assert draws is not None
                initials[name] = Initial("made", make=partial(draws.parameter, key))
            else:
                initials[name] = Initial(w.kind, w.std or 0.02, w.zero_row)
        return initials

    def block_names(self) -> tuple[str, ...]:
        """Return the names of the blocks, for recomputation; () without a list of them."""
        if not self.shape.kind.blocks:
            return ()
        path = f"decoder.{self.shape.kind.blocks}"
        return tuple(f"{path}.{name}" for name, _ in self.get_submodule(path).named_children())

    def may_recompute(self, name: str) -> bool:
        """Return True if this module draws the same when it alone is computed again.

        Where ranks draw together (dropout) only blocks do.
        """
        return not self._draws or name in self.block_names()

    def forward(self, x: Message, position_ids: Tensor | None = None) -> Outputs:
        """Return the activations of the last block here, or on the last stage the logits, or hidden
        states after `return_hidden`.

        x: ids (B, S) int64 on the first stage, else activations (B, S, D), in a tuple with what
            goes beside them; S counts the tokens of this rank. Logits are (B, S, V/n), of this
            rank's columns, with the auxiliary loss of the routers if config.json asks for that
            (output_router_logits).
        position_ids: (B, S) int64 of whole sequences, from 0 in each document of a sample; no
            token sees another document. Where the model masks padding only the first one is text.
        """
        rows: DocumentRows | None = None
        if position_ids is not None and self.shape.documents_way.by == "rows":
            rows, position_ids = DocumentRows(position_ids), None
            x = map_leaves(rows.apart, x, lambda leaf: isinstance(leaf, Tensor))
        ids = x
        outputs = self._outputs(x, position_ids)
        if self._further is not None and self.training:
            return _logits(outputs), self._further.logits(ids)
        if self._returns_hidden:
            outputs, self._hidden = self._hidden, torch.empty(0)
        return outputs if rows is None else rows.joined(outputs)

    def _outputs(self, x: Message, position_ids: Tensor | None) -> Outputs:
        mask: Tensor | None = None
        by = None if position_ids is None else self.shape.documents_way.by
        if by == "not":
            raise DataError(
                f"the data has position_ids, but {self.shape.family} cannot keep documents apart: "
                f"{self.shape.documents_way.problem}; return ids and targets alone"
            )
        if by == "mask":
            assert position_ids is not None
            mask = document_mask(position_ids)
        elif by == "padding":
            assert position_ids is not None
            mask, position_ids = _first_document(position_ids), None
        packed = position_ids
        if self._sequence is not None:
            batch, num = self._batch_and_tokens(first_of(x))
            context_way = self.shape.context_way
            mask, position_ids = inputs_of(
                self._sequence, context_way.attends, num, batch, position_ids, first_of(x).device
            )
            position_ids = position_ids if context_way.positions else None
        rank = 0 if self._group is None else self._group.rank()
        draws = self._draws and self.training
        positions = {} if position_ids is None else {"position_ids": position_ids}
        with (
            ShardDraws(rank, default_draw) if draws else nullcontext(),
            attending(self._sequence, packed),
        ):
            if isinstance(self.decoder, DecoderStage):  # refused where routers have a loss
                # not every class without a table takes positions
                arguments = positions if self.shape.has_table else self._named(positions)
                return self.decoder(x, attention_mask=mask, **(arguments | self._cached))
            # with a cache transformers makes no mask of positions
            arguments = self._named(positions | ({"use_cache": False} if positions else {}))
            arguments |= {} if mask is None else {"attention_mask": mask}
            arguments |= self._routers | self._cached
            output = self.decoder(input_ids=x, return_dict=True, **arguments)
        if self._is_base:
            return output.last_hidden_state
        if not self._routers:
            return output.logits
        if self._top_k:
            return output.logits, router_load(output.router_logits, self._top_k)
        return output.logits, output.aux_loss

    def _batch_and_tokens(self, x: Tensor) -> tuple[int, int]:
        """Return how many rows and tokens ids (B, S) have, or activations of this rank."""
        if x.dim() == 2:
            return x.shape[0], x.shape[1]
        dim = self.shape.kind.sides.token_dim if self.shape.kind.sides else 1
        return x.shape[dim - 1], x.shape[dim] * self.decoder.num_shares

    def _named(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return those of `arguments` that the forward of the class names."""
        return {name: value for name, value in arguments.items() if name in self.takes}

    def return_hidden(self) -> None:
        """Make the last stage return hidden states (B, S, D), the input of its head, in place of
        logits. A head with its own weight is frozen.
        """
        if self._is_base:  # which has none
            return
        decoder: Any = self.decoder
        if isinstance(decoder, DecoderStage):
            decoder = decoder.__dict__.get("_model")
        if decoder is None:  # another stage has the head
            return
        head = decoder.get_output_embeddings()
        path = next(name for name, module in self.named_modules() if module is head)
        names = self.global_names()
        for name, parameter in self.named_parameters():
            # a weight tied to the embedding has the name of that
            if name.startswith(f"{path}.") and names[name] == name.removeprefix("decoder."):
                parameter.requires_grad_(False)

        def keep(hidden: Tensor, *_: object) -> Tensor:
            self._hidden = hidden
            return hidden[..., :1]  # what follows the head, such as a cap of logits, is not needed

        head.forward = keep
        self._returns_hidden = True

    def loss(
        self,
        outputs: Outputs,
        targets: Tensor,
        ignore_index: int = IGNORE,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the tokens' losses, number of tokens counted).

        outputs: logits (B, S, V/n) as `forward` gives them; targets (B, S) int64, the tokens that
        follow: transformers' labels, shifted by one. The auxiliary loss of routers counts as often
        as there are tokens, so that it is added to their mean as transformers adds it.
        """
        logits, count = _logits(outputs), (targets != ignore_index).sum()
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        total = self._entropies(logits, targets, **options)
        if self._further is not None:
            if isinstance(outputs, tuple):  # in training
                further = F.pad(targets[:, 1:], (0, 1), value=ignore_index)
                # over the tokens of the next-token loss, as equation 24 of the report divides it
                of_further = self._entropies(outputs[1], further, **options)
                total = total + self.shape.mtp_loss * of_further
            return total, count
        if isinstance(outputs, tuple) and self._top_k:
            load = router_loss_sum(outputs[1], count, self._top_k)
            total = total + self._auxiliary * load.to(total)
        elif isinstance(outputs, tuple):
            # count first, as an integer times a Python float would be float32
            total = total + self._auxiliary * (count * outputs[1].to(total))
        return total, count

    def _entropies(
        self, logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float
    ) -> Tensor:
        """Return the sum of the tokens' cross entropies."""
        if self.vocab_group is not None:
            return vocab_parallel_cross_entropy(
                logits,
                targets,
                self.vocab_group,
                vocab=self.shape.vocab,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                reduction="sum",
            )
        return F.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="sum",
        )

    def whole_logits(self, outputs: Outputs) -> Tensor:
        """Return logits (..., V), equal over the group, from those (..., V/n) of `forward`."""
        logits = _logits(outputs)
        if self.vocab_group is None:
            return logits
        sizes = even_sizes(self.shape.vocab, self.vocab_group.size())
        return collectives.gather(logits, -1, self.vocab_group, sizes)

    def add_embedding_noise(self, noise: Callable[[Tensor], Tensor]) -> None:
        """Make `noise` change the vectors of tokens in training, at the place where transformers
        does.
        """
        decoder: Any = self.decoder
        base = decoder.base if isinstance(decoder, DecoderStage) else decoder

        def add(module: nn.Module, _: object, vectors: Tensor) -> Tensor:
            return noise(vectors) if module.training else vectors

        base.get_input_embeddings().register_forward_hook(add)

    def make_cache(self) -> "StageTokens | None":
        """Return a cache of keys and values for one batch; None if transformers' does not serve."""
        if self.shape.sequence_parallel or self._sequence is not None:
            return None
        num = self.shape.sizes.layers
        is_staged = isinstance(self.decoder, DecoderStage) and len(self.block_names()) < num
        around = self.shape.kind.sides if is_staged else None
        can, takes_padding = resolve(self.shape.kind.cache)(self.shape.given, around)
        return StageTokens(self, takes_padding) if can else None

    def logits_at(self, outputs: Outputs, position: int) -> Tensor:
        """Return the logits (V,) of one position of the first sample, equal over the group.

        outputs: logits (B, S, V/n) as `forward` gives them.
        """
        return self.whole_logits(_logits(outputs)[0, position])


class StageTokens:
    """A cache of `TransformersStage`, the counterpart of `GPTCache`."""

    def __init__(self, stage: TransformersStage, takes_padding: bool):
        names = stage.block_names()
        first = int(names[0].rpartition(".")[2]) if names else 0
        self._stage, self._cache = stage, TransformersCache(stage.decoder, first)
        self.takes_padding = takes_padding and self._cache.takes_padding

    @contextmanager
    def call(self, num: int, padding: Tensor | None) -> Iterator[None]:
        """Make a forward in the block compute `num` more tokens of each row."""
        with self._cache.call(num, padding) as self._stage._cached:
            try:
                yield
            finally:
                self._stage._cached = {}


def _first_document(position_ids: Tensor) -> Tensor:
    """Return transformers' attention mask (B, S): 1 in the first document of each sample, behind
    which its padding stands.
    """
    return ((position_ids == 0).cumsum(1) == 1).long()


def _head_of(decoder: Any) -> nn.Module:
    """Return the layer that makes logits, of a stage that has all blocks."""
    if isinstance(decoder, DecoderStage):
        decoder = decoder.__dict__["_model"]
    return decoder.get_output_embeddings()


def _logits(outputs: Outputs) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs
