"""Names whose classes need transformers, made when they are asked for."""

from torchdistpackage.parallel.auto.hugging_face import pretrained_class


def __getattr__(name: str) -> object:
    if name != "TensorParallelPreTrainedModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pretrained_class()
