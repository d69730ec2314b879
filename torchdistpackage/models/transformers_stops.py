"""Names the module of a small copy in which a trial stopped, in place of what was raised there."""

from types import FrameType

from torch import nn


def module_of(error: BaseException, *models: nn.Module) -> str:
    """Return the innermost module of `models` that was at work, as `path (Class)`.

    The text of an exception says what a class that nobody has seen ran into, such as an index, and
    not which of its modules is to blame; the frames that it went through do.
    """
    paths = {id(module): path for model in models for path, module in model.named_modules()}
    frames: list[FrameType] = []
    step = error.__traceback__
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and paths.get(id(module)):
            return f"{paths[id(module)]} ({type(module).__name__})"
    return type(models[0]).__name__
