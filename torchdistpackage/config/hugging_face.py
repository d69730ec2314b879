"""Read a transformers folder: config.json as keys of the model section, and its tokenizer.

Every GPT-2 and Llama setting has a key here, changes no number, or is refused. Missing settings get
transformers' defaults. Only the JSON files of a tokenizer are read. No torch.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.errors import ConfigError, DataError

FILE = "config.json"
_OF_TOKENS = ("ForCausalLM", "LMHeadModel", "LMHead", "ForConditionalGeneration", "ForMaskedLM")
"""Ends of the names of classes that predict tokens."""
TRAINER_STATE = "trainer_state.json"
"""The file of each checkpoint of transformers' Trainer."""
ADAPTER_FILE = "adapter_config.json"
"""File that peft writes beside adapters."""
_MAX_CONFIG_BYTES = 1 << 24
FREE_KEYS = ("norm_eps", "rope")
"""Keys that a run may change, because they affect no weight's shape or name."""
GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""transformers' activation_function -> model.mlp; an export writes the first name of each."""
_ROPE = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
ORIGINAL = "original_max_position_embeddings"
_WIDTH = {"n_embed": "hidden_size"}
_FLOAT, _NO_JSON = "__float__", {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
"""Key and values of the mapping that transformers writes for numbers JSON cannot express."""
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
"""model_type -> setting -> older name of the setting; transformers reads both, and the older one
wins.
"""


def config_file(folder: str | Path) -> Path:
    """Return the config.json of a folder, or `folder` itself if it is a .json file."""
    path = Path(folder)
    return path if path.suffix == ".json" else path / FILE


def taken(folder: str | Path) -> str | None:
    """Return why a new model cannot be written to `folder`, or None if it can.

    A folder with files is refused, because old files would mix with new ones.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return f"{folder} exists and is not empty; name a new folder, or remove it"
    return None


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of config.json, under the keys that transformers writes today.

    Args:
        folder: a folder with config.json, or that file itself.

    Raises:
        ConfigError: there is none, or it is not a JSON mapping.
    """
    path = config_file(folder)
    try:
        content = parse_json(read_regular(path, _MAX_CONFIG_BYTES).decode(), _untagged)
    except FileNotFoundError as error:
        why = f"it has no {FILE}" if Path(folder).is_dir() else "there is no such folder"
        if (Path(folder) / ADAPTER_FILE).exists():
            why = f"it has peft's {ADAPTER_FILE}, which is adapters without their model"
        raise ConfigError(f"{folder}: {why}; name the folder of a transformers model") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON mapping; name the folder of a transformers model")
    return _with_keys_of_today(cast(dict[str, Any], content))


def other_model(folder: str | Path) -> str:
    """Return a message if a folder holds no causal language model, else "".

    A reward model or an embedding model, for example, has no head that predicts tokens.
    """
    try:
        listed: Any = read_config(folder).get("architectures")
    except ConfigError:
        return ""
    names = [str(name) for name in cast(list[object], listed)] if isinstance(listed, list) else []
    if not names or any(name.endswith(_OF_TOKENS) for name in names):
        return ""
    return (
        f"{folder} holds {names[0]}, according to its {FILE}, which is not a causal language "
        "model: it has no head that predicts tokens; name the folder of the language model that "
        "it was made from (its architectures end in ForCausalLM)"
    )


def _untagged(mapping: dict[str, Any]) -> Any:
    """Return a JSON mapping unchanged, or the number that transformers wrote as a mapping."""
    tag = mapping.get(_FLOAT) if len(mapping) == 1 else None
    return float(_NO_JSON[tag]) if isinstance(tag, str) and tag in _NO_JSON else mapping


def tagged(value: Any) -> Any:
    """Return `value` with each number that JSON cannot express written as a mapping, as
    transformers does.
    """
    if isinstance(value, dict):
        return {key: tagged(x) for key, x in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [tagged(x) for x in cast(list[Any], value)]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return {_FLOAT: next(tag for tag, text in _NO_JSON.items() if text == str(value))}


def stored_vocabulary(settings: Mapping[str, Any]) -> object:
    """Return the vocabulary size that the settings of a model state, or its default."""
    return settings["vocab_size"] if "vocab_size" in settings else inner_vocabulary(settings)


def with_vocabulary(settings: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Return the settings of the model with its embedding resized to `vocab` rows."""
    text = settings.get("text_config")
    if "vocab_size" not in settings and isinstance(text, dict):
        return {**settings, "text_config": {**cast(dict[str, Any], text), "vocab_size": vocab}}
    return {**settings, "vocab_size": vocab}


def inner_vocabulary(settings: Mapping[str, Any]) -> object:
    """Return the vocabulary size of a model that reads more than text.

    It is in `text_config`, or a default of transformers; None if neither has it.
    """
    text = settings.get("text_config")
    inner = cast(dict[str, Any], text).get("vocab_size") if isinstance(text, dict) else None
    if inner is not None:
        return inner
    try:
        from transformers import CONFIG_MAPPING

        kind: Any = CONFIG_MAPPING[settings["model_type"]]
        config = kind.from_dict(dict(settings))
        return getattr(config.get_text_config(), "vocab_size", None)
    except Exception:
        # transformers is missing, or a class of it raises: the model itself is refused later
        return None


def _with_keys_of_today(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings under the keys that transformers writes today, including model_type."""
    if settings.get("model_type") == "gpt-sw3":  # a tokenizer of its own for the class of GPT-2
        settings = {**settings, "model_type": "gpt2"}
    family = settings.get("model_type")
    others = _OTHER_KEYS.get(family, {}) if isinstance(family, str) else {}
    renamed = {key: settings.pop(old) for old, key in others.items() if old in settings}
    return {**settings, **{key: value for key, value in renamed.items() if value is not None}}


def model_keys(settings: Mapping[str, Any], where: str | Path) -> dict[str, Any]:
    """Return the keys of the model section, except weights, for the model of a config.json.

    Args:
        settings: content of config.json.
        where: what errors call it.

    Raises:
        ConfigError: the model is of another family, or has settings that have no key; lists all.
    """
    families = {"gpt2": (_gpt2, _gpt2_problems), "llama": (_llama, _llama_problems)}
    family = settings.get("model_type")
    if family not in tuple(families):
        raise ConfigError(
            f"{where}: model_type is {family!r}, but model.weights reads {' and '.join(families)} "
            f"only; use model.hf for other models"
        )
    keys_of, problems_of = families[family]
    problems = list(problems_of(settings))
    if settings.get("quantization_config") is not None:
        problems.append("quantization_config is set; use the folder of the unquantized weights")
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
    return keys_of(settings)


def _gpt2(settings: Mapping[str, Any]) -> dict[str, Any]:
    dim = settings.get("n_embd", 768)
    inner = settings.get("n_inner")
    return {
        "layers": settings.get("n_layer", 12),
        "dim": dim,
        "heads": settings.get("n_head", 12),
        "vocab": settings.get("vocab_size", 50257),
        "mlp_hidden": 4 * dim if inner is None and isinstance(dim, int) else inner,
        "mlp": GPT2_ACTIVATIONS[settings.get("activation_function", "gelu_new")],
        "mlp_bias": True,
        "attention_bias": True,
        "norm": "layer",
        "norm_eps": settings.get("layer_norm_epsilon", 1e-5),
        "tied": settings.get("tie_word_embeddings", True),
        "position": "learned",
        "max_seq_len": settings.get("n_positions", 1024),
    }


def _gpt2_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    activation = settings.get("activation_function", "gelu_new")
    if activation not in tuple(GPT2_ACTIVATIONS):
        yield f"activation_function is {activation!r}; use one of {', '.join(GPT2_ACTIVATIONS)}"
    expected = {
        "is_causal": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    for key, value in expected.items():
        if settings.get(key, value) is not value:
            yield f"{key} is {settings[key]!r}, but model.weights needs {value}; use model.hf"


def _llama(settings: Mapping[str, Any]) -> dict[str, Any]:
    dim, heads = settings.get("hidden_size", 4096), settings.get("num_attention_heads", 32)
    kv_heads, head_dim = settings.get("num_key_value_heads"), settings.get("head_dim")
    if isinstance(dim, int) and isinstance(heads, int) and heads and head_dim == dim // heads:
        head_dim = None
    return {
        "layers": settings.get("num_hidden_layers", 32),
        "dim": dim,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "vocab": settings.get("vocab_size", 32000),
        "mlp_hidden": settings.get("intermediate_size", 11008),
        "mlp": "swiglu",
        "mlp_bias": settings.get("mlp_bias", False),
        "attention_bias": settings.get("attention_bias", False),
        "norm": "rms",
        "norm_eps": settings.get("rms_norm_eps", 1e-6),
        "tied": settings.get("tie_word_embeddings", False),
        "position": "rotary",
        "max_seq_len": settings.get("max_position_embeddings", 2048),
        "rope": _rope(settings),
    }


def _llama_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    activation = settings.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        yield f"hidden_act is {activation!r}, but model.weights needs silu; use model.hf"
    if settings.get("is_causal", True) is not True:
        yield f"is_causal is {settings['is_causal']!r}, but model.weights needs True; use model.hf"
    rope = rope_parameters(settings)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        yield f"rope_type is {kind!r}; use default, linear, llama3 or yarn, or model.hf"
    if rope.get("partial_rotary_factor", settings.get("partial_rotary_factor")) not in (
        None,
        1,
        1.0,
    ):
        yield "partial_rotary_factor is set, but model.weights rotates whole heads; use model.hf"


def rope_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope parameters: rope_scaling before transformers 5, or rope_parameters."""
    values = settings.get("rope_scaling") or settings.get("rope_parameters")
    return dict(cast(dict[str, Any], values)) if isinstance(values, dict) else {}


def with_earlier_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` with the rotary settings also under the keys of transformers before 5.

    Those releases ignore `rope_parameters`, which is all that transformers 5 writes.
    """
    rope = rope_parameters(settings)
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta, part = rope.pop("rope_theta", None), rope.pop("partial_rotary_factor", None)
    earlier: dict[str, Any] = {"rope_scaling": None if kind == "default" else rope}
    if theta is not None:
        earlier |= {"rope_theta": theta, "rotary_emb_base": theta}  # the latter for gpt_neox
    if part is not None:
        earlier |= {"partial_rotary_factor": part, "rotary_pct": part}
    return {**settings, **earlier}


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    values, longest = rope_parameters(settings), settings.get("max_position_embeddings", 2048)
    kind = values.get("rope_type", values.get("type", "default"))
    theta = values.get("rope_theta") or settings.get("rope_theta") or 10000.0
    keys = {
        "default": (),
        "linear": _ROPE[:1],
        "llama3": _ROPE[:4],
        "yarn": (_ROPE[0], *_ROPE[3:]),
    }[kind]
    rope = {key: values[key] for key in keys if values.get(key) is not None}
    if ORIGINAL in keys:
        original = rope.setdefault(ORIGINAL, longest)
        if kind == "yarn" and isinstance(longest, int) and isinstance(original, int) and original:
            rope.setdefault("factor", longest / original)
    return {"theta": theta, "type": kind, **rope}


SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
"""Files that name special tokens; the last one also has the chat template."""
_MAX_TOKENIZER_BYTES = 1 << 28


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a folder, or `path` itself if it is a file.

    Raises:
        DataError: there is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"data.tokenizer {path}: {file} is not a file; name a folder with a tokenizer.json of "
            "the tokenizers library, as save_pretrained writes it"
        )
    return file


def vocabulary_size(file: Path) -> int:
    """Return the largest id in a tokenizer.json plus 1; ids may have gaps.

    Raises:
        DataError: it is not a tokenizer of the tokenizers library.
    """
    return max(token_ids(file).values(), default=-1) + 1


def token_ids(file: Path) -> dict[str, int]:
    """Return the id of each token of a tokenizer.json.

    Raises:
        DataError: it is not a tokenizer of the tokenizers library.
    """
    content = read_tokenizer(file)
    try:
        vocab = cast(list[Any] | dict[str, int], content["model"]["vocab"])
        added = cast(list[dict[str, Any]], content.get("added_tokens") or [])
        # a unigram model has a list of [token, score], others have a mapping from token to id
        pairs = {x[0]: i for i, x in enumerate(vocab)} if isinstance(vocab, list) else vocab
        return {**pairs, **{token["content"]: token["id"] for token in added}}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(
            f"{file} is not a tokenizer of the tokenizers library ({error!r}); save the tokenizer "
            "again"
        ) from error


def read_tokenizer(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json; raises DataError if it is not a JSON mapping."""
    return read_mapping(file)


def token_id(tokenizer: Mapping[str, Any], text: str) -> int | None:
    """Return the id of a token in the content of a tokenizer.json, or None."""
    added = cast(list[dict[str, Any]], tokenizer.get("added_tokens") or [])
    if (number := {x.get("content"): x.get("id") for x in added}.get(text)) is not None:
        return number
    model = cast(dict[str, Any], tokenizer.get("model") or {})
    vocab = cast(list[list[Any]] | dict[str, int], model.get("vocab") or {})
    if isinstance(vocab, dict):
        return vocab.get(text)
    return next((i for i, (token, *_) in enumerate(vocab) if token == text), None)


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens by name, such as eos_token, as transformers does.

    special_tokens_map.json wins over tokenizer_config.json, unless the latter has
    `added_tokens_decoder` and is therefore complete. A mapping `extra_special_tokens` names more.

    Raises:
        DataError: a file of the folder that names them is not a JSON mapping.
    """
    tokens_map, config = (
        read_mapping(x) if (x := folder / name).is_file() else {} for name in SETTINGS
    )
    tokens = dict(_tokens(config))
    return tokens if "added_tokens_decoder" in config else tokens | dict(_tokens(tokens_map))


def settings_files(folder: Path) -> list[Path]:
    """Return the files next to tokenizer.json that the ids of a text depend on."""
    return [file for name in SETTINGS if (file := folder / name).is_file()]


_MORE_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")


def _tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    named = {name: x for name, x in settings.items() if name.endswith("_token")}
    for more in (settings.get(key) for key in _MORE_TOKENS):
        named |= cast(dict[str, Any], more) if isinstance(more, dict) else {}
    for name, value in named.items():
        text = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield name, text


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; raises DataError if it is not a mapping."""
    try:
        content = parse_json(read_text(file), _untagged)
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}; repair it, or download it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a JSON mapping; save the tokenizer again")
    return cast(dict[str, Any], content)


def read_text(file: Path) -> str:
    """Return the text of a file of bounded size; raises DataError if it is not UTF-8 text."""
    try:
        return read_regular(file, _MAX_TOKENIZER_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text: byte {error.start}; repair it, or download it again"
        ) from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
