"""What a causal language model of transformers cannot do of what a run asks of it. No torch."""

from math import prod

from torchdistpackage.families.found import SAMPLED, SHARED
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.families.table import FoundModel
from torchdistpackage.layout.partition import either, nearest
from torchdistpackage.models.lora_layout import cut_problem, linear_layers, target_problems
from torchdistpackage.models.model_spec import ModelUse
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    can_share,
    context_problem,
    documents_by,
    weights,
)


def refusals(shape: TransformersShape, use: ModelUse) -> list[tuple[str, str]]:
    """(key, text) of what this model cannot do among what a run asks of it."""
    n, tensor, found = shape.sizes, use.tensor, list[tuple[str, str]]()
    if use.expert > 1:
        found += _unshared(shape, use.expert)
    if use.context > 1 and (why := context_problem(shape)):
        found.append(
            (
                "parallel.context",
                f"{shape.family} cannot attend over parts of a sequence, as {why}; set it to 1",
            )
        )
    if (read := shape.kind.found) is not None:
        return found + _refusals_of_found(shape, read, use)
    if use.document_masks and documents_by(shape) == "not":
        found.append(
            (
                "data.document_masks",
                f"{shape.family} counts distances (ALiBi) across a whole sample; set it to false",
            )
        )
    if not can_share(shape, tensor):
        fits = nearest(tensor, lambda size: can_share(shape, size), at_most=tensor)
        heads = f"{n.heads} heads"
        if n.kv_heads != n.heads:
            heads += f" of {n.kv_heads} key-value heads"
        found.append(
            (
                "parallel.tensor",
                f"{shape.family} with {heads} and an MLP of {n.hidden} cannot be shared by "
                f"parallel.tensor={tensor} ranks, each of which needs whole heads and those that "
                f"they read; set tensor to {either(fits)}",
            )
        )
    if use.num_stages > n.layers:
        found.append(
            (
                "parallel.pipe",
                f"{use.num_stages} stages for the {n.layers} blocks of {shape.family}, of which "
                f"every stage needs one; set parallel.pipe to {n.layers} or less",
            )
        )
    num = tensor if can_share(shape, tensor) else 1
    return found + _too_long(shape) + _lora_problems(shape, num)


def _unshared(shape: TransformersShape, expert: int) -> list[tuple[str, str]]:
    """Why so many ranks cannot share the experts."""
    read = shape.kind.found
    if read is None or not read.shared_experts:
        name = shape.family if read is None else read.class_name
        text = (
            f"parallel.expert={expert} shares experts of {', '.join(SHARED)} over ranks, and those "
            f"of no other model, such as {name}; set expert to 1"
        )
        if read is not None and shape.family in SHARED:
            text = (
                f"parallel.expert={expert}, but this release of transformers does not stack the "
                f"experts of {name}; use transformers 5, or set expert to 1"
            )
        return [("parallel.expert", text)]
    found: list[tuple[str, str]] = []
    if expert > read.shared_experts:
        text = (
            f"parallel.expert={expert} ranks for the {read.shared_experts} experts of "
            f"{read.class_name}, of which each needs one; set expert to {read.shared_experts} or "
            f"less"
        )
        found.append(("parallel.expert", text))
    if shape.lora is not None:
        text = (
            f"adapters are trained beside whole models alone, and parallel.expert={expert} shares "
            f"the experts of {read.class_name}; set expert to 1"
        )
        found.append(("model.lora.target", text))
    return found


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
    known = shape.kind.output, shape.sizes.tied
    problems = target_problems(shape.lora, shape.family, weights(shape), *known)
    found = [("model.lora.target", text) for text in problems]
    if text := cut_problem(weights(shape), shape.packed, tensor):
        found.append(("parallel.tensor", text))
    return found


def _refusals_of_found(
    shape: TransformersShape, read: FoundModel, use: ModelUse
) -> list[tuple[str, str]]:
    """Of a family that has no table."""
    tensor, num_stages = use.tensor, use.num_stages
    asked = {
        "data.document_masks": use.document_masks,
        "parallel.sequence_parallel": shape.sequence_parallel,
    }
    text = (
        f"{read.class_name} cannot do it: only families with a table can, which are "
        f"{', '.join(FAMILIES)}; set it to false"
    )
    found = [(key, text) for key, is_asked in asked.items() if is_asked]
    if use.compares_pairs and read.auxiliary:
        text = (
            f"{read.class_name} adds the loss of its routers to that of tokens, which pairs of "
            f"answers do not have; set output_router_logits to false in config.json"
        )
        found.append(("data.name", text))
    if (why := SAMPLED.get(shape.family)) is not None:
        cut = {"tensor": tensor, "pipe": num_stages}
        text = f"{read.class_name}: {why}; set {{}} to 1, and use data and zero"
        found += [(f"parallel.{x}", text.format(x)) for x, n in cut.items() if n > 1]
        return found + _too_long(shape) + _lora_problems(shape, 1)
    if tensor > 1 and read.uncut is not None:
        text = (
            f"{tensor} ranks that share {read.class_name} by rules do not compute what a small "
            f"copy of it does: {read.uncut}; set tensor to 1, and use data and zero"
        )
        found.append(("parallel.tensor", text))
    if num_stages > 1 and (problem := _unstaged(read, num_stages)) is not None:
        most = 1 if read.unstaged or read.auxiliary else read.sizes.layers
        found.append(("parallel.pipe", f"{problem}; set pipe to at most {most}"))
    num = 1 if read.uncut is not None else tensor
    return found + _too_long(shape) + _lora_problems(shape, num)


def _unstaged(read: FoundModel, num_stages: int) -> str | None:
    if read.unstaged is None and read.auxiliary:
        return (
            f"the auxiliary loss of {read.class_name}'s routers (output_router_logits) is of all "
            f"blocks together, which no stage has"
        )
    if read.unstaged is None and num_stages > read.sizes.layers:
        return f"{num_stages} stages for the {read.sizes.layers} blocks of {read.class_name}"
    return read.unstaged


def goes_with(shape: TransformersShape) -> tuple[tuple[str, str], ...]:
    """What a run of this model may ask for, axis by axis."""
    n = shape.sizes
    if (read := shape.kind.found) is not None:
        most = read.shared_experts
        shared = [("expert", f"up to {most} ranks, whose number divides data's")] if most else []
        return (
            ("data", "any number of ranks"),
            ("zero", "0 to 3"),
            *shared,
            ("context", f"no: {why}" if (why := context_problem(shape)) else "any number of ranks"),
            ("tensor", "any number of ranks, by rules that are tried on a small copy"),
            ("pipe", shape.kind.found.unstaged or f"up to {n.layers} stages, of whole blocks"),
            ("recompute", "none, blocks, auto" if shape.kind.blocks else "none, auto"),
            ("lora", f"on {', '.join(linear_layers(weights(shape)))}"),
        )
    sizes = [str(size) for size in range(1, n.heads + 1) if can_share(shape, size)]
    shown = sizes if len(sizes) <= 12 else [*sizes[:8], "...", sizes[-1]]
    shared = "" if n.kv_heads == n.heads else f" of {n.kv_heads} key-value heads"
    return (
        ("data", "any number of ranks"),
        ("zero", "0 to 3"),
        ("pipe", f"up to {n.layers} stages, of whole blocks"),
        ("tensor", f"{', '.join(shown)} ({n.heads} heads{shared})"),
        ("context", f"no: {why}" if (why := context_problem(shape)) else "any number of ranks"),
        ("sequence_parallel", "yes"),
        ("recompute", "none, blocks, auto"),
        ("lora", f"on {', '.join(linear_layers(weights(shape)))}"),
        ("document_masks", "no: ALiBi" if documents_by(shape) == "not" else "yes"),
    )
