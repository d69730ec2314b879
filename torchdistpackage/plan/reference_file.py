"""The file of a reference's log-probabilities: the origin of its numbers, and whether a run has the
same. No torch.

`tdp reference` writes it, and train.dpo.reference names it. The header of the safetensors file
names the data, tokenizer, keys and reference of the numbers; a run with others is refused, naming
them.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from torchdistpackage.bounded import parse_json
from torchdistpackage.config.errors import Problem
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.data_fingerprint import data_fingerprint

HEADER = "reference"
"""Key of the header's metadata: a JSON object of names and texts."""


def identity(config: RunConfig) -> dict[str, str]:
    """Return, by key, everything that determines the log-probabilities of a run's reference."""
    data, model = config.data, config.model
    folder = model.initial_folder
    if folder is None:
        drawn = json.dumps([model.model_dump(mode="json"), config.run.seed], sort_keys=True)
        reference = hashlib.sha256(drawn.encode()).hexdigest()[:16]
    else:
        reference = data_fingerprint([str(folder)])
    lora = model.lora
    packing = lora.packing
    packed = "" if packing is None else packing.quant_type + " double" * packing.double_quant
    # a chat template may write a date, which a start fills in
    dated = {} if data.template_date is None else {"data.template_date": str(data.template_date)}
    return {
        "data.path": _fingerprint(data.path),
        "data.val_path": _fingerprint(data.val_path),
        "data.tokenizer": _fingerprint(data.tokenizer),
        "data.seq_len": str(data.seq_len),
        "data.bos, data.eos": f"{data.bos}, {data.eos}",
        "the reference model": reference,
        "model.lora.load_in_4bit": packed,
        "precision.dtype": config.precision.dtype,
        **dated,
    }


def _fingerprint(path: str | None) -> str:
    """Return the hash of a file or folder; "" without a path, which would otherwise mean the
    current folder.
    """
    return data_fingerprint([path] if path else [])


def header_of(path: Path) -> dict[str, str]:
    """Return the origin of a file's numbers, from its header.

    Raises:
        ValueError: it is no such file.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
        header = parse_json(metadata[HEADER])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a file that tdp reference has written: {error}") from error
    return {str(key): str(value) for key, value in dict(header).items()}


def differences(header: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Return the names and values of `expected` that differ in a file's header, or ""."""
    return ", ".join(
        f"{name} ({header.get(name) or 'none'} there, {value or 'none'} here)"
        for name, value in expected.items()
        if header.get(name) != value
    )


def wrong_reference(config: RunConfig) -> list[Problem]:
    """Return the problem with the file of train.dpo.reference, or []."""
    key, path = "train.dpo.reference", config.train.dpo.reference
    if path is None:
        return []
    if not Path(path).is_file():
        return [config.problem(key, f"{path} is not a file; write it with tdp reference CONFIG -o")]
    try:
        header = header_of(Path(path))
    except ValueError as error:
        return [config.problem(key, f"{error}; write it with tdp reference CONFIG -o {path}")]
    if not (shown := differences(header, identity(config))):
        return []
    text = (
        f"{path} has log-probabilities of another run: other contents of {shown}; write it anew "
        f"with tdp reference CONFIG -o {path}"
    )
    return [config.problem(key, text)]
