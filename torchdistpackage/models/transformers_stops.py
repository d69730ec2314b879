"""Names the module of a small copy in which a trial stopped, in place of what was raised there."""

from types import FrameType

from torch import nn


def module_of(error: BaseException, *models: nn.Module) -> str:
    """Return the innermost module of `models` that was at work, as `path (Class)`.

    The text of an exception says what a class that nobody has seen ran into, such as an index, and
    not which of its modules is to blame; the frames that it went through do.
    """
    frames: list[FrameType] = []
    step = error.__traceback__
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    at_work = [frame.f_locals.get("self") for frame in frames]
    # a trial may run a copy of a model, which has other modules under the same paths
    copies = [x for x in at_work if isinstance(x, nn.Module) and type(x) is type(models[0])]
    roots = [*models, *copies]
    paths = {id(module): path for root in roots for path, module in root.named_modules()}
    for module in reversed(at_work):
        if isinstance(module, nn.Module) and paths.get(id(module)):
            return f"{paths[id(module)]} ({type(module).__name__})"
    return type(models[0]).__name__
