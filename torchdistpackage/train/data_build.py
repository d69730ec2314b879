"""The data section as objects: what is read, and who draws samples from it."""

from torchdistpackage.config.data_section import DataSection
from torchdistpackage.errors import DataError
from torchdistpackage.train import corpus
from torchdistpackage.train.blend import BlendedDataset, BlendPart
from torchdistpackage.train.data import DataSource, TokenDataset
from torchdistpackage.train.packing import PackedDataset
from torchdistpackage.train.plan import Plan
from torchdistpackage.train.texts import tokenized_part
from torchdistpackage.train.token_cache import cut_documents
from torchdistpackage.train.user_code import user_object


def build_data(plan: Plan) -> DataSource:
    """The data section as a source of batches."""
    section = plan.config.data
    if section.target is not None:
        source = user_object(section.target)(**section.args)
        if not isinstance(source, DataSource):
            raise DataError(
                f"data.target {section.target} returned a {type(source).__name__} without a "
                f"batch(...) method; see train.data.DataSource"
            )
        return source
    if not section.sources:
        return _read(plan, section)
    parts: list[BlendPart] = []
    for key, (label, weight, part) in zip(section.parts, section.blend, strict=True):
        try:
            data = _read(plan, part)
        except DataError as error:
            raise DataError(f"{key} {part.path}: {error}") from error
        parts.append(BlendPart(label, weight, data, data.num_samples["train"]))
    return BlendedDataset(parts, section.global_batch)


def notes_of(data: DataSource) -> list[str]:
    """What to say of documents that are cut."""
    if isinstance(data, BlendedDataset):
        return [f"{part.label}: {note}" for part in data.parts for note in notes_of(part.data)]
    if not isinstance(data, PackedDataset):
        return []
    return list(filter(None, (data.split.note, cut_documents(data.text, data.seq_len))))


def _read(plan: Plan, section: DataSection) -> TokenDataset | PackedDataset:
    """One file or folder, or what data.name has of its own."""
    config = plan.config
    if section.tokenizer is not None:
        return PackedDataset(
            tokenized_part(config, section),
            vocab=config.model.vocab,
            seq_len=section.seq_len,
            global_batch=section.global_batch,
            val_fraction=section.val_fraction,
            document_masks=section.document_masks,
        )
    found = read_corpus(section, section.val_fraction)
    data = TokenDataset(
        found.train,
        found.val,
        config.model.vocab,
        section.seq_len,
        num_val=config.train.eval_batches * section.global_batch,
        global_batch=section.global_batch,
    )
    data.check_length("val")  # now, and not in the first validation
    return data


def read_corpus(section: DataSection, val_fraction: float) -> corpus.Corpus:
    """The token ids of a data section without a tokenizer or target."""
    match section.name:
        case "python_stdlib":
            return corpus.python_stdlib(val_fraction)
        case "text":
            return corpus.text(section.path or "", val_fraction)
        case _:
            return corpus.tokens(section.path or "", section.dtype, val_fraction)
