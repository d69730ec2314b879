"""Rules about several keys of the data section."""

from torchdistpackage.config.cached_datasets import CACHED_KIND, CachedName
from torchdistpackage.config.data_section import (
    CHAT_FIELDS,
    OWN_KEYS,
    PAIRS,
    PREFERENCE,
    ROWS,
    UNPAIRED,
    DataSection,
)
from torchdistpackage.config.embedding_section import EmbeddingSection
from torchdistpackage.config.head_tasks import MOST_CLASSES_OF_A_TEXT
from torchdistpackage.config.preference_losses import PREFERENCE_LOSSES
from torchdistpackage.config.rules import Rule, multiples, named_once, rule
from torchdistpackage.config.schema import DistillSection, DpoSection, RunConfig

_OF_FORMAT = ("data.name", "data.field", "data.tokenizer")


@rule("data.name", "data.target", "data.sources", "data.tokenizer", "data.field", "data.cache")
def _tokenizer_is_for_text(c: RunConfig, world_size: int | None) -> str | None:
    d, plain = c.data, DataSection()
    if d.cache is not None and d.tokenizer is None:
        return f"data.cache={d.cache} has no effect without data.tokenizer; remove it"
    if d.sources:
        return None
    source = f"data.name={d.name}" if d.name else f"data.target={d.target}"
    takes_field = d.name in ROWS
    if (takes_field or (d.spec is not None and d.spec.task)) and d.tokenizer is None:
        return f"{source} needs data.tokenizer, a folder with tokenizer.json"
    reads_text = d.spec is not None and d.spec.reader
    if d.tokenizer is not None and not reads_text:
        return f"data.tokenizer={d.tokenizer} has no effect with {source}; remove it"
    if d.field != plain.field and not takes_field:
        return f"data.field={d.field} has no effect with {source}; remove it"
    return None


@rule(
    *("data.path", "data.name", "data.target", "data.sources"),
    *("data.val_path", "data.val_fraction", "data.eval"),
)
def _cached_names_are_read_as_arrow(c: RunConfig, world_size: int | None) -> str | None:
    for key, part in c.data.all_parts.items():
        if part.name != CACHED_KIND and CachedName.of(part.path or ""):
            return (
                f"{key}={part.path} names a data set in the cache of Hugging Face datasets, which "
                f"name={CACHED_KIND} reads, not {part.name}; set name, or name a file"
            )
    return None


@rule("data.bos", "data.tokenizer", "data.field")
def _bos_is_added_to_texts(c: RunConfig, world_size: int | None) -> str | None:
    return _added_to_texts("data.bos", c.data.bos, c.data)


@rule("data.eos", "data.tokenizer", "data.field")
def _eos_is_added_to_texts(c: RunConfig, world_size: int | None) -> str | None:
    return _added_to_texts("data.eos", c.data.eos, c.data)


def _added_to_texts(key: str, value: str, data: DataSection) -> str | None:
    if value == "on" and data.tokenizer is None:
        return (
            f"{key}=on needs the tokens of data.tokenizer, which is not set; set it or remove {key}"
        )
    if value == "on" and data.field in CHAT_FIELDS:
        return (
            f"{key}=on has no effect with data.field={data.field}, because the chat template "
            f"writes all special tokens; remove {key}"
        )
    return None


@rule("data.document_masks", "data.tokenizer", "model.name", "model.target")
def _documents_are_known(c: RunConfig, world_size: int | None) -> str | None:
    if not c.data.document_masks:
        return None
    if c.data.tokenizer is None:
        return (
            "data.document_masks=true needs data.tokenizer, because without it the ends of "
            "documents are not known; set data.tokenizer, or document_masks to false"
        )
    if c.model.target is not None:
        return (
            f"data.document_masks=true needs positions, but model.target={c.model.target} takes "
            f"token ids only; set document_masks to false, or use model.name or model.hf"
        )
    return None


@rule(
    "data.name",
    "data.target",
    "data.args",
    "data.path",
    "data.sources",
    *(f"data.{key}" for key in OWN_KEYS),
)
def _data_is_named_once(c: RunConfig, world_size: int | None) -> str | None:
    if c.data.sources:
        others = {"data.path": c.data.path, "data.target": c.data.target}
        also_set = [f"{key}={value}" for key, value in others.items() if value is not None]
        if not also_set:
            return None
        return f"data.sources and {' and '.join(also_set)} exclude each other; remove one"
    if text := named_once(c.data, "data"):
        return text
    source = f"data.name={c.data.name}" if c.data.name else f"data.target={c.data.target}"
    spec, plain = c.data.spec, DataSection()
    reads_path = spec is not None and spec.path
    if reads_path and c.data.path is None:
        return f"{source} needs data.path, the {reads_path} to read"
    if not reads_path and c.data.path is not None:
        return f"data.path={c.data.path} has no effect with {source}; remove it"
    for key in OWN_KEYS:
        value = getattr(c.data, key)
        if value != getattr(plain, key) and (spec is None or key not in spec.keys):
            return f"data.{key}={value} has no effect with {source}; remove it"
    return None


@rule("data.streaming", "data.name", "data.tokenizer", "data.val_path", "train.epochs")
def _streamed_texts_have_their_own_validation(c: RunConfig, world_size: int | None) -> str | None:
    d = c.data
    if not d.streaming:
        return None
    problems: list[str] = []
    if d.tokenizer is None:
        problems.append("data.tokenizer, as only texts are tokenized")
    if d.val_path is None:
        problems.append("data.val_path, as a part for validation is not known before all is read")
    if c.train.epochs is not None:
        problems.append("train.steps in place of train.epochs, as the samples are not known before")
    if d.spec is not None and not d.spec.in_blend:
        problems.append(f"texts, not data.name={d.name}")
    if not problems:
        return None
    return f"data.streaming=true needs {'; '.join(problems)}; change these, or remove streaming"


@rule("data.packing", "data.tokenizer")
def _documents_are_packed(c: RunConfig, world_size: int | None) -> str | None:
    if c.data.packing == "auto" or c.data.tokenizer is not None:
        return None
    return (
        f"data.packing={c.data.packing} needs data.tokenizer, because without it the ends of "
        f"documents are not known; set data.tokenizer, or remove packing"
    )


@rule("data.val_path", "data.eval", "data.target", "data.sources", *_OF_FORMAT)
def _evaluation_is_of_our_data(c: RunConfig, world_size: int | None) -> str | None:
    data, problems = c.data, list[str]()
    parts = {f"data.eval.{name}": x for name, x in data.eval_parts.items()}
    parts |= {} if data.val_part is None else {"data.val_path": data.val_part}
    if parts and data.target is not None:
        return (
            f"{', '.join(parts)} has no effect with data.target={data.target}, whose `batch` also "
            f"returns the validation data; remove it"
        )
    if reserved := sorted({"val", "val_loss"} & {*data.eval}):
        problems.append(f"data.eval.{reserved[0]}: this is the name of the validation; use another")
    trains = [x.section for x in data.blend] or [data]
    is_bytes = trains[0].has_bytes
    for key, part in parts.items():
        if part.name in ROWS and part.tokenizer is None:
            problems.append(
                f"{key} ({part.name}) needs data.tokenizer, a folder with tokenizer.json"
            )
        elif is_bytes != part.has_bytes:
            kinds = ("bytes", "token ids") if is_bytes else ("token ids", "bytes")
            problems.append(
                f"{key} has {kinds[1]}, but training has {kinds[0]}; set data.tokenizer"
            )
    return "; ".join(problems) or None


@rule(
    "data.name",
    "data.sources",
    "data.field",
    "data.document_masks",
    "data.packing",
    "model.loss",
    "model.moe.num_experts",
    "parallel.expert",
    *(f"train.dpo.{key}" for key in DpoSection.model_fields),
)
def _pairs_are_compared(c: RunConfig, world_size: int | None) -> str | None:
    d, plain = c.data, RunConfig()
    if not d.is_preference:
        options, default = c.train.dpo, plain.train.dpo
        if any(getattr(options, x) != getattr(default, x) for x in DpoSection.model_fields):
            return (
                "train.dpo is for preference pairs; set data.name to preference, or remove "
                "train.dpo"
            )
        if d.head is None:
            return None
    problems: list[str] = []
    if d.document_masks or d.packing != plain.data.packing:
        key, value = ("document_masks", "true") if d.document_masks else ("packing", d.packing)
        problems.append(f"data.{key}={value} (each text has a row of its own)")
    has_fields = d.field != plain.data.field or any(x.field is not None for x in d.sources)
    if (d.is_pairs or d.is_preference) and has_fields:
        problems.append("data.field (the fields are prompt, chosen and rejected)")
    if odd := sorted({x.name for x in d.sources if x.name is not None}):
        problems.append(f"data.sources with name={', '.join(odd)} (all sources hold such rows)")
    if c.model.loss is not None:
        problems.append(f"model.loss={c.model.loss} (the data decides the loss)")
    if c.model.moe.num_experts is not None or c.parallel.expert > 1:
        problems.append("mixtures of experts (their balance loss counts tokens)")
    if not problems:
        return None
    return f"data.name={d.name} does not go with {' nor with '.join(problems)}; remove it"


@rule(
    "data.name",
    "data.labels",
    "data.class_weights",
    "data.multi_label",
    "data.field",
    "model.hf",
    "model.name",
    "model.target",
)
def _heads_are_of_transformers(c: RunConfig, world_size: int | None) -> str | None:
    d, problems = c.data, list[str]()
    if d.head is None:
        return None
    if c.model.hf is None:
        problems.append(
            "needs a model of transformers, whose class with a head it trains; set model.hf to its "
            "folder"
        )
    if twice := sorted({x for x in d.labels if d.labels.count(x) > 1}):
        problems.append(f"has the class {twice[0]!r} twice in data.labels; name each once")
    if len(d.labels) == 1 and not d.multi_label:
        problems.append("has one class in data.labels, so there is nothing to tell apart; name two")
    if d.multi_label and len(d.labels) > MOST_CLASSES_OF_A_TEXT:
        problems.append(
            f"has {len(d.labels)} classes in data.labels, and data.multi_label takes up to "
            f"{MOST_CLASSES_OF_A_TEXT}; use fewer"
        )
    if d.labels and d.class_weights and len(d.labels) != len(d.class_weights):
        problems.append(
            f"has {len(d.class_weights)} data.class_weights for {len(d.labels)} data.labels; give "
            f"one for each"
        )
    if d.head.is_of_tokens and d.field in (*CHAT_FIELDS, PAIRS):
        problems.append(f"has data.field={d.field}; name the field that holds a list of words")
    return "; and ".join(f"data.name={d.name} {text}" for text in problems) or None


_READ_BY_SOME = ("label_smoothing", "gamma", "desirable_weight", "undesirable_weight")


@rule("train.dpo.loss", "data.name")
def _answers_are_labelled_or_paired(c: RunConfig, world_size: int | None) -> str | None:
    spec, data = c.train.dpo.spec, c.data
    if not data.is_preference or spec.is_unpaired == data.is_unpaired:
        return None
    losses = [x.name for x in PREFERENCE_LOSSES.values() if x.is_unpaired == data.is_unpaired]
    kind = "labelled answers" if data.is_unpaired else "pairs"
    other = PREFERENCE if data.is_unpaired else UNPAIRED
    return (
        f"train.dpo.loss={spec.name} is not for data.name={data.name}, which reads {kind}; set "
        f"loss to {' or '.join(losses)}, or name to {other}"
    )


@rule("data.global_batch", "data.name", "data.sources")
def _answers_have_others_beside(c: RunConfig, world_size: int | None) -> str | None:
    if not c.data.is_unpaired:
        return None
    if c.data.sources:
        return (
            f"data.name={c.data.name} does not go with data.sources (mismatched answers are those "
            f"of one file); join the files, or name a folder of them as data.path"
        )
    if c.data.global_batch > 1:
        return None
    return (
        f"data.global_batch={c.data.global_batch} leaves kto no other answer to estimate the "
        f"divergence from; set it to 2 or more"
    )


@rule("train.dpo.reference", "train.dpo.loss", "data.name", "data.sources", "data.eval")
def _cached_reference_has_rows(c: RunConfig, world_size: int | None) -> str | None:
    options, data = c.train.dpo, c.data
    if options.reference is None or not data.is_preference:
        return None
    if not options.spec.has_reference:
        why = f"train.dpo.loss={options.loss} has no reference"
    elif data.is_unpaired:
        why = "the mismatched answers of kto differ from step to step"
    elif data.sources or data.eval:
        why = f"it has the rows of data.path, not of data.{'sources' if data.sources else 'eval'}"
    else:
        return None
    return f"train.dpo.reference={options.reference} does not go with this run: {why}; remove it"


@rule("train.dpo.loss", *(f"train.dpo.{key}" for key in _READ_BY_SOME))
def _loss_of_pairs_reads_its_keys(c: RunConfig, world_size: int | None) -> str | None:
    options, plain = c.train.dpo, RunConfig().train.dpo
    unread = [
        f"train.dpo.{key}={getattr(options, key)}"
        for key in _READ_BY_SOME
        if key not in options.spec.takes and getattr(options, key) != getattr(plain, key)
    ]
    if not unread:
        return None
    return f"train.dpo.loss={options.loss} does not read {' and '.join(unread)}; remove it"


@rule(
    "data.name",
    "data.sources",
    "data.field",
    "data.document_masks",
    "data.packing",
    "model.hf",
    "model.loss",
    *(f"train.embedding.{key}" for key in EmbeddingSection.model_fields),
)
def _texts_are_compared(c: RunConfig, world_size: int | None) -> str | None:
    d, plain, options = c.data, DataSection(), c.train.embedding
    if not d.is_embedding:
        if all(getattr(options, x) == y for x, y in EmbeddingSection()):
            return None
        return (
            "train.embedding is for texts to compare; set data.name to embedding, or remove "
            "train.embedding"
        )
    problems: list[str] = []
    if c.model.hf is None:
        problems.append("a model that is not of transformers; set model.hf to its folder")
    if d.document_masks or d.packing != plain.packing:
        key, value = ("document_masks", "true") if d.document_masks else ("packing", d.packing)
        problems.append(f"data.{key}={value} (each text has a row of its own)")
    if d.field != plain.field or any(x.field is not None for x in d.sources):
        problems.append("data.field (the fields are anchor, positive and negatives)")
    if odd := sorted({x.name for x in d.sources if x.name is not None}):
        problems.append(f"data.sources with name={', '.join(odd)} (all sources hold such lines)")
    if c.model.loss is not None:
        problems.append(f"model.loss={c.model.loss} (the loss compares embeddings)")
    if not problems:
        return None
    return f"data.name=embedding does not go with {' nor with '.join(problems)}; remove it"


@rule("train.embedding.matryoshka_weights", "train.embedding.matryoshka_dims")
def _each_dim_has_a_weight(c: RunConfig, world_size: int | None) -> str | None:
    dims, weights = c.train.embedding.matryoshka_dims, c.train.embedding.matryoshka_weights
    if len(weights) in (0, len(dims)):
        return None
    return (
        f"train.embedding.matryoshka_weights has {len(weights)} numbers for the {len(dims)} of "
        f"matryoshka_dims; give one for each, or none for 1 each"
    )


@rule(
    *(f"train.distill.{key}" for key in DistillSection.model_fields),
    "data.name",
    "model.loss",
    "model.target",
    "model.moe.num_experts",
)
def _a_teacher_has_tokens(c: RunConfig, world_size: int | None) -> str | None:
    options, plain = c.train.distill, DistillSection()
    key = "teacher" if options.logits is None else "logits"
    teacher = f"train.distill.{key}={getattr(options, key)}"
    if not options.is_on:
        unread = [
            f"train.distill.{key}={getattr(options, key)}"
            for key in DistillSection.model_fields
            if getattr(options, key) != getattr(plain, key)
        ]
        text = f"{' and '.join(unread)} has no effect without train.distill.teacher; set it, or"
        return f"{text} remove train.distill" if unread else None
    if options.kd_ratio == 0:
        return f"train.distill.kd_ratio=0 leaves {teacher} without effect; raise it, or remove both"
    if (options.teacher or "").endswith(".json"):
        text = f"train.distill.teacher={options.teacher} is a file without weights"
        return f"{text}; name the folder of a trained model"
    problems: list[str] = []
    if c.data.spec is not None and c.data.spec.task:
        problems.append(f"data.name={c.data.name} (its loss is not of tokens)")
    if c.model.loss is not None:
        problems.append(f"model.loss={c.model.loss} (the loss compares logits)")
    if c.model.target is not None:
        problems.append(f"model.target={c.model.target} (its outputs need not be logits)")
    if c.model.moe.num_experts is not None:
        problems.append("model.moe (no run with a teacher was compared)")
    return f"{teacher} does not go with {' nor with '.join(problems)}" if problems else None


@rule(
    *(f"train.distill.teacher_{x}" for x in ("tensor", "pipe", "zero")),
    "train.distill.logits",
    *("parallel.tensor", "parallel.data", "parallel.context", "parallel.pipe"),
)
def _a_teacher_has_its_own_degrees(c: RunConfig, world_size: int | None) -> str | None:
    options, p = c.train.distill, c.parallel
    given = {
        f"train.distill.teacher_{name}": value
        for name in ("tensor", "pipe", "zero")
        if (value := getattr(options, f"teacher_{name}"))
    }
    if not given or not options.is_on:
        return None
    key, problems = " and ".join(f"{k}={x}" for k, x in given.items()), list[str]()
    if not options.runs_teacher:
        return f"{key} has no effect beside train.distill.logits, as no teacher runs; remove it"
    tensor, pipe = options.teacher_tensor or p.tensor, options.teacher_pipe or p.pipe
    if p.context > 1 and options.has_own_degrees:
        problems.append(
            f"does not go with parallel.context={p.context}, whose ranks have different slices of "
            f"a sequence, where the ranks of a teacher compute the same tokens; remove it, or "
            f"write the teacher's file with tdp reference"
        )
    if tensor % p.tensor:
        problems.append(
            f"is not a multiple of parallel.tensor={p.tensor}; set it to "
            f"{multiples(p.tensor, tensor)}"
        )
    elif p.data != "auto" and (ranks := p.data * p.tensor * p.pipe) % (tensor * pipe):
        names = ("data", "tensor") + (("pipe",) if p.pipe > 1 or pipe > 1 else ())
        degrees = " x ".join(f"parallel.{name}={getattr(p, name)}" for name in names)
        fits = [n for n in range(1, ranks + 1) if ranks % (n * pipe) == 0 and n % p.tensor == 0]
        advice = f"set train.distill.teacher_tensor to {' or '.join(map(str, fits))}"
        if not fits:
            advice = f"set train.distill.teacher_pipe to a divisor of {ranks // p.tensor}"
        problems.append(f"does not divide {degrees}; {advice}")
    return f"{key} {'; and '.join(problems)}" if problems else None


@rule("train.distill.beta", "train.distill.logits")
def _a_file_has_the_likeliest_tokens(c: RunConfig, world_size: int | None) -> str | None:
    options = c.train.distill
    if options.logits is None or options.beta == 0:
        return None
    return (
        f"train.distill.beta={options.beta:g} needs the teacher's probabilities of all tokens, but "
        f"train.distill.logits={options.logits} has those of the most likely ones; set beta to 0, "
        f"or remove logits and name a teacher"
    )


_READ = ("data.sources", *_OF_FORMAT)
"""Keys that decide how sources are read."""


@rule("data.sources")
def _sources_have_weights(c: RunConfig, world_size: int | None) -> str | None:
    sources = c.data.sources
    if pathless := [f"data.sources[{i}]" for i, x in enumerate(sources) if x.path is None]:
        return f"{', '.join(pathless)} has no path; give each source the file or folder to read"
    if not sources or sum(x.weight for x in sources) > 0:
        return None
    return (
        f"the weights of the {len(sources)} data.sources add up to 0, so no sample can be drawn; "
        f"give one of them a weight above 0, or remove the weights for equal shares"
    )


@rule(*_READ)
def _sources_are_told_apart(c: RunConfig, world_size: int | None) -> str | None:
    labels = [x.label for x in c.data.blend]
    if not (twice := sorted({x for x in labels if labels.count(x) > 1})):
        return None
    return (
        f"data.sources: {labels.count(twice[0])} of them have the label {twice[0]}, which names "
        f"them in the log; give each its own label"
    )


@rule(*_READ, "data.document_masks")
def _sources_are_read_as_named(c: RunConfig, world_size: int | None) -> str | None:
    problems: list[str] = []
    for index, (source, (_, _, section)) in enumerate(
        zip(c.data.sources, c.data.blend, strict=True)
    ):
        where, lines = f"data.sources[{index}]", section.name in ROWS
        if lines and section.tokenizer is None:
            problems.append(
                f"{where} ({section.name}) needs data.tokenizer, a folder with tokenizer.json"
            )
        if source.field is not None and not lines:
            problems.append(
                f"{where}: field={source.field} has no effect with {section.name}; remove it"
            )
        if c.data.document_masks and section.spec and not section.spec.reader:
            problems.append(
                f"{where} is token ids, whose documents data.document_masks cannot tell apart; use "
                f"texts, or set document_masks to false"
            )
    if not problems and {x.section.has_bytes for x in c.data.blend} == {True, False}:
        problems.append(
            "data.sources mix bytes of text with token ids, which have no vocabulary in common; "
            "set data.tokenizer, or use token ids only"
        )
    return "; ".join(problems) or None


DATA_RULES = tuple(x for x in tuple(globals().values()) if isinstance(x, Rule))
"""The rules of this file, in its order."""
