"""Rules of the model section: sizes must fit each other and the ranks."""

from operator import attrgetter

from torchdistpackage.config.model_section import (
    LoraSection,
    ModelSection,
    MoESection,
    RopeSection,
)
from torchdistpackage.config.rules import Rule, divisors, multiples, named_once, rule
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.types import MAX_MLP_RATIO
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.exchanges import EXCHANGES
from torchdistpackage.layout.partition import all_have_heads, all_have_some, either, nearest
from torchdistpackage.layout.rope import Rope

_TARGET_KEYS = ("name", "target", "hf", "args", "loss")
_LORA_KEYS = tuple(f"lora.{key}" for key in LoraSection.model_fields if key != "target")
_MOE_KEYS = tuple(f"moe.{key}" for key in MoESection.model_fields)
_ROPE_KEYS = tuple(f"rope.{key}" for key in RopeSection.model_fields)
_GPT_KEYS = tuple(
    key
    for key in ModelSection.model_fields
    if key not in (*_TARGET_KEYS, "vocab", "rope", "lora", "moe", "mtp", "mtp_loss")
)


def _changed(model: ModelSection, *names: str) -> list[str]:
    """Return the keys among these that do not have their defaults."""
    default = ModelSection()
    return [f"model.{x}" for x in names if attrgetter(x)(model) != attrgetter(x)(default)]


@rule("model.heads", "model.kv_heads", "parallel.tensor", "model.name")
def _heads_over_tensor(c: RunConfig, world_size: int | None) -> str | None:
    heads, tensor = c.model.heads, c.parallel.tensor
    kv = c.model.kv_heads or heads
    if c.model.name is None or heads % kv or all_have_heads(heads, kv, tensor):
        return None
    ranks = nearest(tensor, lambda n: all_have_heads(heads, kv, n), at_most=tensor)
    if kv == heads:
        shared, more = "", (tensor,)
    else:
        shared = f" of model.kv_heads={kv} groups"
        more = nearest(heads, lambda n: n % kv == 0 and all_have_heads(n, kv, tensor))
    offers = f"set tensor to {either(ranks)}" + (f", or heads to {either(more)}" if more else "")
    and_evenly = "" if kv == heads else ", and each group the same number of ranks"
    return (
        f"model.heads={heads}{shared} cannot be shared by parallel.tensor={tensor} ranks, as each "
        f"needs one{and_evenly}; {offers}"
    )


@rule("parallel.cp_comm_type", "parallel.context", "model.heads", "model.kv_heads", "model.name")
def _heads_over_context(c: RunConfig, world_size: int | None) -> str | None:
    exchange = EXCHANGES.get(c.parallel.cp_comm_type)
    if c.model.name is None or c.parallel.context == 1 or exchange is None:
        return None
    heads, kv, size = c.model.heads, c.model.kv_heads or c.model.heads, c.parallel.context
    tensor = c.parallel.tensor
    if heads % tensor or exchange.swap == "blocks":  # blocks are chosen by the heads
        return None
    if exchange.swap == "none":
        problem = exchange.heads_problem(heads // tensor, max(kv // tensor, 1), size)
        return problem and f"parallel.cp_comm_type={exchange.name}: {problem}"
    if heads // tensor % size == 0:
        return None
    return (
        f"parallel.cp_comm_type={exchange.name} gives each of parallel.context={size} ranks whole "
        f"heads, but a tensor rank has {heads // tensor} (model.heads={heads} / "
        f"parallel.tensor={tensor}, {kv} of keys); set cp_comm_type to p2p, or context to "
        f"{divisors(heads // tensor, size)}"
    )


@rule("model.kv_heads", "model.heads", "model.name")
def _kv_heads_divide_heads(c: RunConfig, world_size: int | None) -> str | None:
    heads, kv = c.model.heads, c.model.kv_heads
    if c.model.name is None or kv is None or heads % kv == 0:
        return None
    return (
        f"model.heads={heads} is not a multiple of model.kv_heads={kv}; set kv_heads to "
        f"{divisors(heads, kv)}, or heads to {multiples(kv, heads)}"
    )


@rule("model.head_dim", "model.position", "model.name")
def _heads_turn_in_pairs(c: RunConfig, world_size: int | None) -> str | None:
    width = c.model.head_dim
    if c.model.name is None or c.model.position != "rotary" or width is None or width % 2 == 0:
        return None
    return (
        f"model.head_dim={width} is odd, but model.position=rotary rotates pairs of channels; set "
        f"head_dim to {multiples(2, width)}"
    )


@rule("model.dim", "model.heads", "model.head_dim", "model.position", "model.name")
def _dim_over_heads(c: RunConfig, world_size: int | None) -> str | None:
    dim, heads = c.model.dim, c.model.heads
    unit = 2 if c.model.position == "rotary" else 1
    if c.model.name is None or c.model.head_dim is not None or dim % (heads * unit) == 0:
        return None
    why = f"model.dim={dim} is not a multiple of model.heads={heads}"
    if dim % heads == 0:
        why = f"model.dim={dim} / model.heads={heads} gives heads of {dim // heads}, an odd width, "
        why += "but model.position=rotary rotates pairs of channels"
    offers = f"set dim to {multiples(heads * unit, dim)}"
    if dim % unit == 0:
        offers += f", or heads to {divisors(dim // unit, heads)}"
    return f"{why}; {offers}"


@rule("model.mlp_ratio", "model.mlp_hidden", "model.dim", "parallel.tensor", "model.name")
def _hidden_over_tensor(c: RunConfig, world_size: int | None) -> str | None:
    hidden, tensor = c.model.hidden, c.parallel.tensor
    if c.model.name is None or c.model.mlp_hidden is not None or all_have_some(hidden, tensor):
        return None
    good = min(max(round(hidden / tensor), 1), c.model.dim * MAX_MLP_RATIO // tensor) * tensor
    return (
        f"the MLP is model.dim={c.model.dim} x model.mlp_ratio={c.model.mlp_ratio:g} = {hidden} "
        f"wide, too narrow to give each of parallel.tensor={tensor} ranks a part; set mlp_ratio to "
        f"{_ratio(good, c.model.dim)}, which gives {good}, or change dim"
    )


@rule("model.mlp_hidden", "parallel.tensor", "model.name")
def _own_hidden_over_tensor(c: RunConfig, world_size: int | None) -> str | None:
    hidden, tensor = c.model.mlp_hidden, c.parallel.tensor
    if c.model.name is None or hidden is None or all_have_some(hidden, tensor):
        return None
    use = nearest(hidden, lambda n: all_have_some(n, tensor))
    return (
        f"model.mlp_hidden={hidden} is too narrow to give each of parallel.tensor={tensor} ranks a "
        f"part; set mlp_hidden to {either(use)}"
    )


def _ratio(hidden: int, dim: int) -> str:
    """Return the mlp_ratio that gives `hidden`, in as few digits as possible, at least 6."""
    texts = (f"{hidden / dim:.{digits}g}" for digits in range(6, 18))
    return next(text for text in texts if round(dim * float(text)) == hidden)


@rule("model.name", "model.target", "model.args", "model.hf")
def _model_is_named_once(c: RunConfig, world_size: int | None) -> str | None:
    others = {"name": c.model.name, "target": c.model.target}
    both = [f"model.{key}={value}" for key, value in others.items() if value is not None]
    if c.model.hf is None:
        return named_once(c.model, "model")
    if both:
        return f"model.hf={c.model.hf} and {' and '.join(both)} exclude each other; keep one"
    if c.model.args:
        keys = ", ".join(c.model.args)
        return f"model.args ({keys}) has no effect without model.target; remove it"
    return None


@rule(
    *(f"model.{key}" for key in (*_GPT_KEYS, *_ROPE_KEYS, *_MOE_KEYS)),
    "model.name",
    "model.target",
    "model.hf",
)
def _model_keys_are_read(c: RunConfig, world_size: int | None) -> str | None:
    unread = _changed(c.model, *_GPT_KEYS, *_ROPE_KEYS, *_MOE_KEYS)
    if c.model.name is not None or not unread:
        return None
    if c.model.hf is not None:
        return (
            f"{', '.join(unread)} has no effect, because the config.json of "
            f"model.hf={c.model.hf} describes the model; remove it here and change config.json"
        )
    if c.model.target is None:
        return None
    return (
        f"{', '.join(unread)} has no effect, because model.target={c.model.target} builds the "
        f"model; move what it takes to model.args, and remove the rest"
    )


@rule(*(f"model.{key}" for key in _ROPE_KEYS), "model.position", "model.name")
def _rope_is_complete(c: RunConfig, world_size: int | None) -> str | None:
    if c.model.name is None:
        return None
    if c.model.position != "rotary":
        unread = _changed(c.model, *_ROPE_KEYS)
        why = f"has no effect with model.position={c.model.position}; remove it"
        return f"{', '.join(unread)} {why}" if unread else None
    try:
        Rope(**{key: getattr(c.model.rope, key) for key in RopeSection.model_fields})
    except LayoutError as error:
        return f"model.{error}"
    return None


@rule("model.mlp_hidden", "model.mlp_ratio", "model.name")
def _mlp_width_is_given_once(c: RunConfig, world_size: int | None) -> str | None:
    ratio, hidden = c.model.mlp_ratio, c.model.mlp_hidden
    if c.model.name is None or hidden is None or ratio == ModelSection().mlp_ratio:
        return None
    return (
        f"model.mlp_ratio={ratio:g} has no effect with model.mlp_hidden={hidden}; remove one of "
        f"them"
    )


@rule("data.seq_len", "model.max_seq_len", "model.position", "model.name")
def _positions_cover_sequences(c: RunConfig, world_size: int | None) -> str | None:
    seq_len, most = c.data.seq_len, c.model.max_seq_len
    learned = c.model.name is not None and c.model.position == "learned"
    if not learned or most is None or seq_len <= most:
        return None
    return (
        f"data.seq_len={seq_len}, but model.position=learned has positions for "
        f"model.max_seq_len={most} tokens; set seq_len to {most}, or max_seq_len to {seq_len}"
    )


@rule("model.lora.target", "model.hf")
def _adapters_have_weights_to_adapt(c: RunConfig, world_size: int | None) -> str | None:
    if c.model.lora.target is None or (c.model.hf is not None and c.model.initial_folder):
        return None
    names = f"model.lora.target=[{', '.join(c.model.lora.target)}]"
    if c.model.hf is None:
        return f"{names} adapts the modules of a transformers model; set model.hf to its folder"
    return (
        f"{names} trains only adapters, but model.hf={c.model.hf} has no weights for them to "
        "adapt; set model.hf to a folder with weights"
    )


@rule(*(f"model.{key}" for key in _LORA_KEYS), "model.lora.target")
def _lora_keys_are_read(c: RunConfig, world_size: int | None) -> str | None:
    unread = _changed(c.model, *_LORA_KEYS)
    if c.model.lora.target is not None or not unread:
        return None
    return (
        f"{', '.join(unread)} has no effect without model.lora.target; set it to the layers to "
        f"adapt, such as [q_proj, v_proj]"
    )


@rule("model.mtp", "model.mtp_loss", "model.hf")
def _mtp_is_read(c: RunConfig, world_size: int | None) -> str | None:
    unread = _changed(c.model, "mtp", "mtp_loss")
    if c.model.hf is None and unread:
        return f"{', '.join(unread)} has no effect without model.hf, whose folder has such layers"
    if c.model.mtp != "train" and "model.mtp_loss" in unread:
        return "model.mtp_loss has no effect without model.mtp=train"
    return None


@rule(
    "model.mtp",
    "model.lora.target",
    "parallel.pipe",
    "parallel.context",
    "parallel.sequence_parallel",
    "data.document_masks",
    "data.name",
    "train.distill.teacher",
)
def _mtp_trains_alone(c: RunConfig, world_size: int | None) -> str | None:
    parallel = c.parallel
    on = {
        "model.lora.target": c.model.lora.target is not None,
        "parallel.pipe": parallel.pipe > 1,
        "parallel.context": parallel.context > 1,
        "parallel.sequence_parallel": parallel.sequence_parallel,
        "data.document_masks": c.data.document_masks,
        "data.name": c.data.is_preference or c.data.is_embedding or c.data.head is not None,
        "train.distill.teacher": c.train.distill.teacher is not None,
    }
    wrong = [key for key, is_on in on.items() if is_on]
    if c.model.mtp != "train" or not wrong:
        return None
    return (
        f"model.mtp=train needs whole sequences of next tokens beside the last block, which "
        f"{' and '.join(wrong)} would not leave there; set model.mtp to keep, or turn that off"
    )


@rule("model.lora.modules_to_save", "data.name", "train.dpo.reference")
def _saved_modules_are_no_reference(c: RunConfig, world_size: int | None) -> str | None:
    modules = c.model.lora.modules_to_save
    if modules is None or c.model.lora.target is None or not c.has_reference:
        return None
    return (
        f"model.lora.modules_to_save=[{', '.join(modules)}] changes weights of the model itself, "
        f"which without its adapters is the reference of data.name={c.data.name}; set "
        f"train.dpo.reference to a file of the reference's numbers, or remove modules_to_save"
    )


@rule("model.lora.load_in_8bit", "model.lora.load_in_4bit")
def _weights_have_one_format(c: RunConfig, world_size: int | None) -> str | None:
    if not (c.model.lora.load_in_8bit and c.model.lora.load_in_4bit):
        return None
    return "model.lora.load_in_8bit and load_in_4bit are both true; set one of them to false"


@rule("model.lora.bnb_4bit_use_double_quant", "model.lora.load_in_4bit", "model.lora.target")
def _scales_are_of_4_bits(c: RunConfig, world_size: int | None) -> str | None:
    lora = c.model.lora
    if lora.target is None or lora.load_in_4bit or not lora.bnb_4bit_use_double_quant:
        return None
    return (
        "model.lora.bnb_4bit_use_double_quant has no effect without load_in_4bit; set that to "
        "true, or remove it"
    )


@rule("model.lora.load_in_4bit", "model.lora.load_in_8bit", "precision.fp8", "train.compile")
def _matmuls_of_packed_weights(c: RunConfig, world_size: int | None) -> str | None:
    lora = c.model.lora
    if not (lora.load_in_4bit or lora.load_in_8bit):
        return None
    keys = {"precision.fp8": c.precision.fp8, "train.compile": c.train.compile}
    on = [f"{key}={value}" for key, value in keys.items() if value != "off"]
    if not on:
        return None
    key = "load_in_8bit" if lora.load_in_8bit else "load_in_4bit"
    return (
        f"model.lora.{key} unpacks weights inside their matmuls, which {' and '.join(on)} would "
        f"replace; set that to off, or {key} to false"
    )


MODEL_RULES = tuple(x for x in tuple(globals().values()) if isinstance(x, Rule))
"""The rules of this file, in its order."""
