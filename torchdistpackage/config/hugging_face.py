"""What a folder of transformers says: config.json as keys of the model section, and its tokenizer.

GPT-2 and Llama, whose every setting either has a key, changes no number, or is refused. What a
file leaves out has the default of transformers. Of a tokenizer, as save_pretrained writes it, JSON
alone is read. No torch.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.errors import ConfigError, DataError

FILE = "config.json"
_OF_TOKENS = ("ForCausalLM", "LMHeadModel", "LMHead", "ForConditionalGeneration", "ForMaskedLM")
"""Ends of names of classes that predict tokens."""
ADAPTER_FILE = "adapter_config.json"
"""Of peft, beside adapters."""
_MAX_CONFIG_BYTES = 1 << 24
FREE_KEYS = ("norm_eps", "rope")
"""What a run may set otherwise: no weight has another shape or name for it."""
GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""transformers' activation_function -> ours; the first name of ours is the one that is written."""
_ROPE = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
)
ORIGINAL = "original_max_position_embeddings"
_WIDTH = {"n_embed": "hidden_size"}
_FLOAT, _NO_JSON = "__float__", {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
"""How transformers writes numbers that JSON does not have: the key, and what it holds."""
_OTHER_KEYS = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "bloom": {**_WIDTH, "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    "falcon": _WIDTH,
}
"""Keys that transformers reads as well, and which count where both are there."""


def config_file(folder: str | Path) -> Path:
    """The config.json of a folder, or the file that is named itself."""
    path = Path(folder)
    return path if path.suffix == ".json" else path / FILE


def taken(folder: str | Path) -> str | None:
    """What is wrong with `folder` for a new model, if anything: old files would mix with new."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return f"{folder} exists and is not empty; name a new folder, or remove it"
    return None


def read_config(folder: str | Path) -> dict[str, Any]:
    """The content of `folder`/config.json, or of the file that is named itself, under the keys
    that transformers saves today.

    Raises:
        ConfigError: there is none, or it is no JSON mapping.
    """
    path = config_file(folder)
    try:
        found = parse_json(read_regular(path, _MAX_CONFIG_BYTES).decode(), _untagged)
    except FileNotFoundError as error:
        here = f"it has no {FILE}" if Path(folder).is_dir() else "no such folder"
        if (Path(folder) / ADAPTER_FILE).exists():
            here = f"it has peft's {ADAPTER_FILE}, of adapters without their model"
        raise ConfigError(f"{folder}: {here}; name the folder of a transformers model") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no mapping; name the folder of a transformers model")
    return _with_keys_of_today(cast(dict[str, Any], found))


def other_model(folder: str | Path) -> str:
    """Return what to say of a folder that holds no causal language model; "" of one that does.

    For example the folder of a reward model or of an embedding model, which has no head that
    predicts tokens.
    """
    try:
        listed: Any = read_config(folder).get("architectures")
    except ConfigError:
        return ""
    names = [str(name) for name in cast(list[object], listed)] if isinstance(listed, list) else []
    if not names or any(name.endswith(_OF_TOKENS) for name in names):
        return ""
    return (
        f"{folder} holds {names[0]} by its {FILE}, which is no causal language model: it has no "
        f"head that predicts tokens; name the folder of the language model it was made from (its "
        f"architectures end in ForCausalLM)"
    )


def _untagged(found: dict[str, Any]) -> Any:
    """A mapping of JSON, or the number that transformers wrote as one."""
    tag = found.get(_FLOAT) if len(found) == 1 else None
    return float(_NO_JSON[tag]) if isinstance(tag, str) and tag in _NO_JSON else found


def tagged(value: Any) -> Any:
    """`value` as transformers writes it: each number that JSON does not have as a mapping."""
    if isinstance(value, dict):
        return {key: tagged(x) for key, x in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [tagged(x) for x in cast(list[Any], value)]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return {_FLOAT: next(tag for tag, text in _NO_JSON.items() if text == str(value))}


def inner_vocabulary(found: Mapping[str, Any]) -> object:
    """The number of token ids of a model that reads more than texts, which is said within, or by
    the defaults of transformers where it is left out; None: nobody says it."""
    text = found.get("text_config")
    inner = cast(dict[str, Any], text).get("vocab_size") if isinstance(text, dict) else None
    if inner is not None:
        return inner
    try:
        from transformers import CONFIG_MAPPING

        kind: Any = CONFIG_MAPPING[found["model_type"]]
        whole = kind.from_dict(dict(found))
        return getattr(whole.get_text_config(), "vocab_size", None)
    except Exception:
        # without transformers, or whatever a class raises: the model itself is refused later
        return None


def _with_keys_of_today(found: dict[str, Any]) -> dict[str, Any]:
    """Each setting under the one key that transformers saves it as."""
    family = found.get("model_type")
    others = _OTHER_KEYS.get(family, {}) if isinstance(family, str) else {}
    renamed = {key: found.pop(old) for old, key in others.items() if old in found}
    return {**found, **{key: value for key, value in renamed.items() if value is not None}}


def model_keys(found: Mapping[str, Any], where: str | Path) -> dict[str, Any]:
    """The model section that describes the model of a config.json, but for its weights.

    where: what errors call it.

    Raises:
        ConfigError: the model is of another family, or has settings that have no key; lists all.
    """
    families = {"gpt2": (_gpt2, _gpt2_problems), "llama": (_llama, _llama_problems)}
    family = found.get("model_type")
    if family not in tuple(families):
        raise ConfigError(
            f"{where}: model_type is {family!r}; weights can be read of {', '.join(families)}"
        )
    keys_of, problems_of = families[family]
    problems = list(problems_of(found))
    if found.get("quantization_config") is not None:
        problems.append("quantization_config is set; use the folder of the full weights")
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
    return keys_of(found)


def _gpt2(found: Mapping[str, Any]) -> dict[str, Any]:
    dim = found.get("n_embd", 768)
    inner = found.get("n_inner")
    return {
        "layers": found.get("n_layer", 12),
        "dim": dim,
        "heads": found.get("n_head", 12),
        "vocab": found.get("vocab_size", 50257),
        "mlp_hidden": 4 * dim if inner is None and isinstance(dim, int) else inner,
        "mlp": GPT2_ACTIVATIONS[found.get("activation_function", "gelu_new")],
        "mlp_bias": True,
        "attention_bias": True,
        "norm": "layer",
        "norm_eps": found.get("layer_norm_epsilon", 1e-5),
        "tied": found.get("tie_word_embeddings", True),
        "position": "learned",
        "max_seq_len": found.get("n_positions", 1024),
    }


def _gpt2_problems(found: Mapping[str, Any]) -> Iterator[str]:
    activation = found.get("activation_function", "gelu_new")
    if activation not in tuple(GPT2_ACTIVATIONS):
        yield f"activation_function is {activation!r}; use {', '.join(GPT2_ACTIVATIONS)}"
    wanted = {
        "is_causal": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    for key, value in wanted.items():
        if found.get(key, value) is not value:
            yield f"{key} is {found[key]!r}, and only {value} can be trained here"


def _llama(found: Mapping[str, Any]) -> dict[str, Any]:
    dim, heads = found.get("hidden_size", 4096), found.get("num_attention_heads", 32)
    kv_heads, head_dim = found.get("num_key_value_heads"), found.get("head_dim")
    if isinstance(dim, int) and isinstance(heads, int) and heads and head_dim == dim // heads:
        head_dim = None
    return {
        "layers": found.get("num_hidden_layers", 32),
        "dim": dim,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "vocab": found.get("vocab_size", 32000),
        "mlp_hidden": found.get("intermediate_size", 11008),
        "mlp": "swiglu",
        "mlp_bias": found.get("mlp_bias", False),
        "attention_bias": found.get("attention_bias", False),
        "norm": "rms",
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        "tied": found.get("tie_word_embeddings", False),
        "position": "rotary",
        "max_seq_len": found.get("max_position_embeddings", 2048),
        "rope": _rope(found),
    }


def _llama_problems(found: Mapping[str, Any]) -> Iterator[str]:
    activation = found.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        yield f"hidden_act is {activation!r}, and only silu can be trained here"
    if found.get("is_causal", True) is not True:
        yield f"is_causal is {found['is_causal']!r}, and only True can be trained here"
    rope = rope_parameters(found)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        yield f"rope_type is {kind!r}; use default, linear, llama3 or yarn"
    if rope.get("partial_rotary_factor", found.get("partial_rotary_factor")) not in (None, 1, 1.0):
        yield "partial_rotary_factor is set, and only whole heads can be turned here"


def rope_parameters(found: Mapping[str, Any]) -> dict[str, Any]:
    """Those of today; those of before transformers 5 where there are such."""
    values = found.get("rope_scaling") or found.get("rope_parameters")
    return dict(cast(dict[str, Any], values)) if isinstance(values, dict) else {}


def with_earlier_rope(found: Mapping[str, Any]) -> dict[str, Any]:
    """`found` with its rotary positions in the keys that transformers before 5 reads, too.

    It ignores `rope_parameters`, which is all that transformers 5 writes.
    """
    rope = rope_parameters(found)
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta, part = rope.pop("rope_theta", None), rope.pop("partial_rotary_factor", None)
    earlier: dict[str, Any] = {"rope_scaling": None if kind == "default" else rope}
    if theta is not None:
        earlier |= {"rope_theta": theta, "rotary_emb_base": theta}  # the second of gpt_neox
    if part is not None:
        earlier |= {"partial_rotary_factor": part, "rotary_pct": part}
    return {**found, **earlier}


def _rope(found: Mapping[str, Any]) -> dict[str, Any]:
    values, longest = rope_parameters(found), found.get("max_position_embeddings", 2048)
    kind = values.get("rope_type", values.get("type", "default"))
    theta = values.get("rope_theta") or found.get("rope_theta") or 10000.0
    read = {
        "default": (),
        "linear": _ROPE[:1],
        "llama3": _ROPE[:4],
        "yarn": (_ROPE[0], *_ROPE[3:]),
    }[kind]
    rope = {key: values[key] for key in read if values.get(key) is not None}
    if ORIGINAL in read:
        original = rope.setdefault(ORIGINAL, longest)
        if kind == "yarn" and isinstance(longest, int) and isinstance(original, int) and original:
            rope.setdefault("factor", longest / original)
    return {"theta": theta, "type": kind, **rope}


SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
"""Where special tokens are named, and in the last one how they are written."""
_MAX_TOKENIZER_BYTES = 1 << 28


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json of a folder, or that file itself.

    Raises:
        DataError: there is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"data.tokenizer {path}: {file} is no file; give a folder with the tokenizer.json of "
            f"the tokenizers library, as save_pretrained writes it"
        )
    return file


def vocabulary_size(file: Path) -> int:
    """The largest id of a tokenizer.json and 1, as ids may have gaps.

    Raises:
        DataError: it is no tokenizer of the tokenizers library.
    """
    found = read_tokenizer(file)
    try:
        vocab = cast(list[Any] | dict[str, int], found["model"]["vocab"])
        added = cast(list[dict[str, int]], found.get("added_tokens") or [])
        # of a unigram model a list of [token, score]; of all others a mapping from token to id
        ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
        return max([*ids, *(token["id"] for token in added)], default=-1) + 1
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is no tokenizer of the tokenizers library: {error!r}") from error


def read_tokenizer(file: Path) -> dict[str, Any]:
    """The content of a tokenizer.json; raises DataError if it is no JSON mapping."""
    return read_mapping(file)


def token_id(tokenizer: Mapping[str, Any], text: str) -> int | None:
    """The id of a token in the content of a tokenizer.json; None if it has no such token."""
    added = cast(list[dict[str, Any]], tokenizer.get("added_tokens") or [])
    if (number := {x.get("content"): x.get("id") for x in added}.get(text)) is not None:
        return number
    model = cast(dict[str, Any], tokenizer.get("model") or {})
    vocab = cast(list[list[Any]] | dict[str, int], model.get("vocab") or {})
    if isinstance(vocab, dict):
        return vocab.get(text)
    return next((i for i, (token, *_) in enumerate(vocab) if token == text), None)


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens by name, such as eos_token, as transformers has them.

    special_tokens_map.json goes before tokenizer_config.json, unless that one has
    `added_tokens_decoder`: then it is complete. A mapping `extra_special_tokens` names more.

    Raises:
        DataError: a file of the folder that names them is no JSON mapping.
    """
    tokens_map, config = (
        read_mapping(x) if (x := folder / name).is_file() else {} for name in SETTINGS
    )
    found = dict(_tokens(config))
    return found if "added_tokens_decoder" in config else found | dict(_tokens(tokens_map))


def settings_files(folder: Path) -> list[Path]:
    """Return the files next to tokenizer.json on which ids of any text depend."""
    return [file for name in SETTINGS if (file := folder / name).is_file()]


_MORE_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")


def _tokens(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    named = {name: x for name, x in found.items() if name.endswith("_token")}
    for more in (found.get(key) for key in _MORE_TOKENS):
        named |= cast(dict[str, Any], more) if isinstance(more, dict) else {}
    for name, value in named.items():
        text = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield name, text


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; raises DataError if it is no mapping."""
    try:
        found = parse_json(read_text(file), _untagged)
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} is no JSON mapping; save the tokenizer again")
    return cast(dict[str, Any], found)


def read_text(file: Path) -> str:
    """Return the text of a file of bounded size; raises DataError if it is none."""
    try:
        return read_regular(file, _MAX_TOKENIZER_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: byte {error.start}") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
