"""A model of transformers for `tdp prove`: a small copy of it, and a run around it. No torch.

The copy has the same classes and kinds of layers (models/shrunk_config.py) and random weights.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.config.hugging_face import FILE
from torchdistpackage.config.load import loads
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.models.shrunk_config import shrunk
from torchdistpackage.plan.run_plan import Plan, local_procs, make_plan

BYTES, SEQ_LEN = 256, 16
_AXES = ("parallel.data=2", "parallel.pipe=2", "parallel.tensor=2")
_MOST_BYTES = 1 << 20
_TEXT = ("text_config", "decoder", "generator", "text_encoder")
"""Where transformers' `get_text_config` looks."""
_VOCABS = (
    *("vocab_size", "vocab_size_per_layer_input"),
    *("unpadded_vocab_size", "decoder_vocab_size"),
)
"""Settings that count token ids."""


def is_model(argument: str) -> bool:
    """Return whether `argument` names a transformers folder or its config.json instead of a run's
    file.
    """
    path = Path(argument)
    return (path / FILE).is_file() or (path.suffix == ".json" and path.is_file())


def model_plan(argument: str, overrides: Sequence[str], scratch: Path) -> tuple[Plan, list[str]]:
    """Return the plan of a run with a small copy of the model, and notes on it.

    If `overrides` sets no degree, the plan has two ranks along data, pipe and tensor, without axes
    along which the model cannot be split.

    Raises:
        ConfigError: the folder has no configuration, or nothing is left to compare.
    """
    text = f"model: {{hf: {json.dumps(str(Path(argument)))}}}\n"
    text += f"data: {{seq_len: {SEQ_LEN}}}\nlaunch: {{local: {{procs: null}}}}\n"
    if any(override.startswith("parallel.") for override in overrides):
        return _small_plan(loads(text, overrides=overrides), scratch), []
    overrides_kept, reasons = list[str](), dict[str, str]()
    for axis in _AXES:
        try:
            _small_plan(loads(text, overrides=[*overrides, *overrides_kept, axis]), scratch)
        except ConfigError as error:
            reasons[axis] = _reason(error)
        else:
            overrides_kept.append(axis)
    notes = [f"left out {axis}: {reason}" for axis, reason in reasons.items()]
    if not overrides_kept:
        # a folder that cannot be read is so for every axis
        alone = len(set(reasons.values())) == 1
        raise ConfigError(next(iter(reasons.values())) if alone else "; ".join(notes))
    return _small_plan(loads(text, overrides=[*overrides, *overrides_kept]), scratch), notes


def _small_plan(config: RunConfig, scratch: Path) -> Plan:
    small = with_small_copy(config, scratch)
    return make_plan(small, local_procs(small))


def with_small_copy(config: RunConfig, scratch: Path) -> RunConfig:
    """Return the run with a small copy of its `model.hf`, which is written into `scratch`.

    Raises:
        ConfigError: its configuration cannot be read.
    """
    assert config.model.hf is not None
    folder = Path(config.model.hf)
    path = folder / FILE if folder.is_dir() else folder
    try:
        config_dict: Any = parse_json(read_regular(path, _MOST_BYTES).decode())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration: {error}") from error
    small = shrunk(config_dict)
    # tokens are bytes, unless the data are those of the model's own tokenizer
    has_own = config.data.tokenizer is not None or config.data.name == "tokens"
    for whole, copied in ((config_dict, small), *_text_settings(config_dict, small)):
        for key in _VOCABS:
            if isinstance(whole.get(key), int):
                copied[key] = whole[key] if has_own else BYTES
    copy = scratch / FILE
    copy.write_text(json.dumps(small))
    sizes = {"vocab": small["vocab_size"]} if "vocab_size" in config_dict else {}
    model = config.model.model_copy(update={"hf": str(copy), **sizes})
    data = config.data.model_copy(update={"seq_len": min(config.data.seq_len, SEQ_LEN)})
    return config.model_copy(update={"model": model, "data": data})


def _text_settings(config_dict: Any, small: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the settings of text inside those of a model of several kinds of input, and of parts
    that read the model's own vocabulary, as BLT's encoder does, and the small copy's.
    """
    vocab = config_dict.get("vocab_size")
    for key, part in config_dict.items():
        if not isinstance(part, dict) or not isinstance(small.get(key), dict):
            continue
        if key in _TEXT or (vocab is not None and part.get("vocab_size") == vocab):
            yield part, small[key]


def _reason(error: ConfigError) -> str:
    problems = getattr(error, "problems", None)
    return str(problems[0].text if problems else error)
