"""Refuse what a causal language model of transformers cannot do for a run. No torch."""

from math import prod

from torchdistpackage.config.head_tasks import MOST_CLASSES_OF_A_TEXT, ModelHead
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.families.table import ContextWay
from torchdistpackage.layout.partition import either, nearest
from torchdistpackage.models.lora_layout import (
    cut_problem,
    is_of_stack,
    linear_layers,
    saved_problems,
    stack_names,
    target_problems,
    token_problems,
)
from torchdistpackage.models.model_spec import ModelUse
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    can_share,
    context_problem,
    layouts,
    weights,
)


def refusals(shape: TransformersShape, use: ModelUse) -> list[tuple[str, str]]:
    """Return (key, text) of each thing that a run asks for and this model cannot do."""
    name, tensor, problems = shape.class_name, use.tensor, list[tuple[str, str]]()
    if use.expert > 1:
        problems += _unshared(shape, use.expert, tensor)
    if use.context > 1 and (why := context_problem(shape)):
        problems.append(
            (
                "parallel.context",
                f"{shape.family} cannot attend over parts of a sequence, as {why}; set it to 1",
            )
        )
    elif use.context > 1 and (text := _gathers_slices(shape)) is not None:
        problems.append(("parallel.sequence_parallel", text))
    if use.document_masks and (text := _mixes_documents(shape, use)) is not None:
        problems.append(("data.document_masks", text))
    if shape.sequence_parallel and (text := _slices_nothing(shape)) is not None:
        problems.append(("parallel.sequence_parallel", text))
    if use.tp_comm_overlap and not shape.kind.splits_sequence:
        problems.append(("parallel.tp_comm_overlap", _needs_table(shape)))
    if use.compiles_blocks and shape.kind.shared_experts and use.expert > 1:
        problems.append(("train.compile", _routed(shape)))
    elif use.compiles_blocks and (stack := _adapted_stack(shape)) is not None:
        text = (
            f"blocks is for blocks that become one graph, and {stack} of {name} gets its adapter "
            f"outside of one; set compile to off"
        )
        problems.append(("train.compile", text))
    if use.compares_rows and shape.kind.auxiliary:
        text = (
            f"{name} adds the loss of its routers to that of tokens, which rows to compare do not "
            f"have; set output_router_logits to false in config.json"
        )
        problems.append(("data.name", text))
    if use.only_distils and shape.kind.auxiliary:
        text = (
            f"1 leaves out the loss of tokens, to which {name} adds that of its routers; use less "
            f"than 1, or set output_router_logits to false in config.json"
        )
        problems.append(("train.distill.kd_ratio", text))
    if use.head is not None:
        problems += _head_problems(shape, use.head, use.num_class_weights)
    shares = can_share(shape, tensor)
    if not shares:
        problems.append(("parallel.tensor", _uncut(shape, tensor)))
    if use.num_stages > 1 and (problem := _unstaged(shape, use.num_stages)) is not None:
        problems.append(("parallel.pipe", problem))
    return problems + _too_long(shape) + _lora_problems(shape, tensor if shares else 1)


def _adapted_stack(shape: TransformersShape) -> str | None:
    """Return the name of a matrix of experts that has an adapter, or None."""
    adapters = (name for name, x in layouts(shape).items() if is_of_stack(x))
    return next((name.rpartition(".")[0] for name in adapters), None)


def _head_problems(
    shape: TransformersShape, head: ModelHead, num_class_weights: int
) -> list[tuple[str, str]]:
    """Return what is wrong with the classes of a head, which the folder may name."""
    problems: list[tuple[str, str]] = []
    if head.task.has_classes and not head.labels:
        text = (
            f"data.labels names no class, and neither does the folder of {shape.family}, which has "
            f"no head; list the names of the classes, or their number"
        )
        problems.append(("data.labels", text))
    elif num_class_weights not in (0, len(head.labels)):
        text = (
            f"{num_class_weights} weights for the {len(head.labels)} classes "
            f"({', '.join(head.labels[:4])}...); give one for each"
        )
        problems.append(("data.class_weights", text))
    if head.multi_label and len(head.labels) > MOST_CLASSES_OF_A_TEXT:
        text = (
            f"{shape.family} has {len(head.labels)} classes, and data.multi_label takes up to "
            f"{MOST_CLASSES_OF_A_TEXT}; list fewer in data.labels, with the folder of the language "
            f"model"
        )
        problems.append(("data.multi_label", text))
    return problems


def _gathers_slices(shape: TransformersShape) -> str | None:
    """Return why tensor ranks cannot share the tokens of a context rank; None: they can."""
    mixing = (*shape.context_way.scanned, *shape.context_way.gathered)
    if not (shape.sequence_parallel and shape.kind.splits_sequence and mixing):
        return None
    return (
        f"with parallel.context above 1 {mixing[0]} of {shape.class_name} gets the tokens of all "
        f"context ranks, while tensor ranks split them inside of it; set it to false"
    )


def _mixes_documents(shape: TransformersShape, use: ModelUse) -> str | None:
    """Return why documents of one sample cannot be kept apart; None: they can."""
    way, name = shape.documents_way, shape.class_name
    if way.problem:
        return f"{way.problem}; set it to false"
    if way.by in ("padding", "not"):
        return _needs_table(shape)
    context = ContextWay() if use.context == 1 else shape.context_way
    mixing = (*context.scanned, *context.gathered)
    if way.by != "rows" and not mixing:
        return None
    apart = "each document of a sample gets a row of its own"
    if use.context > 1:
        mixer_text = f", as of {mixing[0]}" if mixing else ""
        return (
            f"{name} keeps documents apart only where {apart}, which ranks with parts of a sample "
            f"cannot do{mixer_text}; set parallel.context to 1, or document_masks to false"
        )
    if shape.sequence_parallel:
        return (
            f"for {name} {apart}, whose length {use.tensor} ranks of sequence_parallel need not "
            f"share evenly; set one of the two to false"
        )
    if shape.kind.auxiliary:
        return (
            f"for {name} {apart}, and its routers' loss (output_router_logits) would count the "
            f"padding behind them; set output_router_logits to false in config.json"
        )
    return None


def _slices_nothing(shape: TransformersShape) -> str | None:
    """Return why ranks cannot have slices of the sequence between blocks; None: they can."""
    if shape.kind.splits_sequence:
        return None
    if shape.head is not None:
        return _needs_table(shape)
    if shape.kind.unstaged is not None:
        return f"{shape.kind.unstaged}; set it to false"
    return None


def _routed(shape: TransformersShape) -> str:
    """Return why a block whose experts are on several ranks is not a graph."""
    by_name = layouts(shape)
    path = next(x for x, at in by_name.items() if "expert" in at.split_axes).rpartition(".")[0]
    return (
        f"blocks is for blocks that become one graph, and {path} of {shape.class_name}, whose "
        f"experts parallel.expert shares, counts the tokens for each rank on the host; set "
        f"compile to auto, which leaves such blocks uncompiled, or to off"
    )


def _needs_table(shape: TransformersShape) -> str:
    return (
        f"{shape.class_name} cannot do it: only families with a table can, which are "
        f"{', '.join(FAMILIES)}; set it to false"
    )


def _uncut(shape: TransformersShape, tensor: int) -> str:
    """Return why so many tensor ranks cannot share the model."""
    n = shape.sizes
    if shape.kind.unshared is not None:
        return (
            f"{tensor} ranks that share {shape.class_name} by rules do not compute what a small "
            f"copy of it does: {shape.kind.unshared}; set tensor to 1, and use data and zero"
        )
    fits = nearest(tensor, lambda size: can_share(shape, size), at_most=tensor)
    heads = f"{n.heads} heads"
    if n.kv_heads != n.heads:
        heads += f" of {n.kv_heads} key-value heads"
    return (
        f"{shape.family} with {heads} and an MLP of {n.hidden} cannot be shared by "
        f"parallel.tensor={tensor} ranks, each of which needs whole heads and those that they "
        f"read; set tensor to {either(fits)}"
    )


def _unstaged(shape: TransformersShape, num_stages: int) -> str | None:
    """Return why its blocks cannot be split over so many stages; None: they can."""
    kind, layers = shape.kind, shape.sizes.layers
    if kind.unstaged is not None:
        return f"{kind.unstaged}; set pipe to at most 1"
    if kind.auxiliary:
        return (
            f"the auxiliary loss of {shape.class_name}'s routers (output_router_logits) is of all "
            f"blocks together, which no stage has; set pipe to at most 1"
        )
    if num_stages <= layers:
        return None
    return (
        f"{num_stages} stages for the {layers} blocks of {shape.class_name}, of which every stage "
        f"needs one; set pipe to at most {layers}"
    )


def _unshared(shape: TransformersShape, expert: int, tensor: int) -> list[tuple[str, str]]:
    """Return why so many ranks cannot share the experts."""
    name, most = shape.class_name, shape.kind.shared_experts
    if not most:
        text = (
            f"parallel.expert={expert} shares experts whose matrices transformers stacks in one "
            f"module, and {name} has none such; set expert to 1"
        )
        if shape.kind.experts_alone:
            text = (
                f"parallel.expert={expert} with parallel.tensor={tensor}: tensor ranks cannot cut "
                f"the experts of {name} too, which are not plain gated MLPs and run by "
                "transformers' own code; set one of the two to 1"
            )
        return [("parallel.expert", text)]
    problems: list[tuple[str, str]] = []
    if expert > most:
        text = (
            f"parallel.expert={expert} ranks for the {most} experts of {name}, of which each needs "
            f"one; set expert to {most} or less"
        )
        problems.append(("parallel.expert", text))
    return problems


def _too_long(shape: TransformersShape) -> list[tuple[str, str]]:
    positions, axes = shape.sizes.positions, shape.given.get("axial_pos_shape")
    if shape.family == "reformer" and axes and prod(axes) != shape.seq_len:
        text = (
            f"data.seq_len={shape.seq_len}, but in training the axial positions of reformer "
            f"(axial_pos_shape {axes}) are for {prod(axes)} tokens; set seq_len to {prod(axes)}"
        )
        return [("data.seq_len", text)]
    if positions is None or shape.seq_len <= positions:
        return []
    text = (
        f"data.seq_len={shape.seq_len}, but positions are learned for {positions}; set seq_len to "
        f"{positions} or less"
    )
    return [("data.seq_len", text)]


def _lora_problems(shape: TransformersShape, tensor: int) -> list[tuple[str, str]]:
    if shape.lora is None:
        return []
    problems = target_problems(shape.lora, shape.family, weights(shape), shape.tied)
    of_adapters = [("model.lora.target", text) for text in problems]
    saved = saved_problems(shape.lora, shape.family, weights(shape), shape.tied)
    of_adapters += [("model.lora.modules_to_save", text) for text in saved]
    vocab, stored = shape.vocab, shape.stored_vocab
    of_adapters += token_problems(shape.lora, shape.family, weights(shape), vocab, stored)
    if text := cut_problem(shape.lora, weights(shape), shape.packed, tensor):
        of_adapters.append(("parallel.tensor", text))
    return of_adapters


def goes_with(shape: TransformersShape) -> tuple[tuple[str, str], ...]:
    """Return what a run of this model may ask for, axis by axis."""
    n, kind = shape.sizes, shape.kind
    most, by, why = kind.shared_experts, shape.documents_way, context_problem(shape)
    listed = weights(shape)
    rows = {
        "data": "any number of ranks",
        "zero": "0 to 3",
        "expert": f"up to {most} ranks, whose number divides data's" if most else "",
        "pipe": kind.unstaged or f"up to {n.layers} stages, of whole blocks",
        "tensor": _tensor_ranks(shape),
        "context": f"no: {why}" if why else _context_text(shape),
        "sequence_parallel": _sequence_text(shape),
        "recompute": "none, blocks, offload, auto" if kind.blocks else "none, auto",
        "lora": f"on {', '.join((*linear_layers(listed), *stack_names(listed)))}",
        "document_masks": f"no: {by.problem}" if by.problem else _documents_text(shape),
    }
    return tuple((axis, text) for axis, text in rows.items() if text)


def _sequence_text(shape: TransformersShape) -> str:
    if shape.kind.splits_sequence:
        return "yes"
    return "" if _slices_nothing(shape) else "yes, between blocks, each of which sees all of it"


def _context_text(shape: TransformersShape) -> str:
    """Return how context ranks share a sequence, as text."""
    context_way = shape.context_way
    gathered_text = (
        (f"; all of a sequence in {', '.join(context_way.gathered)}")
        if context_way.gathered
        else ""
    )
    keys = "" if context_way.attends == "parts" else ", each with the keys of all"
    states = (
        (f"; states of {', '.join(context_way.scanned)} cross the ranks")
        if context_way.scanned
        else ""
    )
    return f"any number of ranks{keys}{states}{gathered_text}"


def _documents_text(shape: TransformersShape) -> str:
    by = shape.documents_way.by
    texts = {"not": "", "padding": "", "rows": "yes, each document in a row of its own"}
    return texts.get(by, "yes")


def _tensor_ranks(shape: TransformersShape) -> str:
    """Return how many tensor ranks can share the model, as text."""
    n = shape.sizes
    if not shape.kind.deals_heads:
        return "any number of ranks, by rules that are tried on a small copy"
    sizes = [str(size) for size in range(1, n.heads + 1) if can_share(shape, size)]
    shown = sizes if len(sizes) <= 12 else [*sizes[:8], "...", sizes[-1]]
    shared = "" if n.kv_heads == n.heads else f" of {n.kv_heads} key-value heads"
    return f"{', '.join(shown)} ({n.heads} heads{shared})"
