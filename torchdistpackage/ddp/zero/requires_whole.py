"""Which optimizers may see pieces of parameters. Names, no torch.

One rule: a parameter may be cut anywhere only if each element's update reads that element alone.
What is known to be so is listed; everything else gets whole parameters, one owner each, and what
needs all of them at once is refused.
"""

from collections.abc import Sequence

from torchdistpackage.errors import LayoutError

ELEMENTWISE = frozenset(
    {
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    }
)
"""Classes of torch.optim, exactly these: a class made from one may do anything."""

MATRIXWISE = frozenset({"Adafactor", "Muon"})
"""Classes of torch.optim whose update of an element reads its rows and columns."""

REFUSED = {
    "LBFGS": "its step reads the gradients of all parameters as one vector, several times a step",
    "SparseAdam": "its gradients are rows, which no bucket holds",
}

SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""State of torch.optim's classes that is one number a parameter, whatever its shape."""


def requires_whole_params(
    optimizer: object, whole: bool | None = None, split: Sequence[str] = ()
) -> bool:
    """Whether `optimizer` gets whole parameters; False lets them be cut anywhere.

    optimizer: of any class, with param_groups. whole: what the user knows of a class of his own;
    None takes whole parameters for every class that is not known. split: names of parameters
    of which each rank holds only a part, as tensor parallelism has them.

    Raises:
        LayoutError: the class cannot work on a part of the parameters, or needs whole ones and
            there are none.
    """
    kind = type(optimizer)
    bases = {c.__name__ for c in kind.__mro__ if _is_torch(c)}
    for name in bases & REFUSED.keys():
        raise LayoutError(
            f"{kind.__name__} cannot be sharded: {REFUSED[name]}; use it without ZeRO, or use "
            f"one of {', '.join(sorted(ELEMENTWISE))}"
        )
    _refuse_differentiable(optimizer)
    known = kind.__name__ if _is_torch(kind) else ""
    if bases & MATRIXWISE and whole is False:
        raise LayoutError(
            f"{kind.__name__} reads rows and columns of a parameter, so whole=False would train "
            f"differently; leave whole= out"
        )
    needs = known not in ELEMENTWISE if whole is None else whole
    if needs and split and known not in ELEMENTWISE:
        raise LayoutError(
            f"{kind.__name__} needs whole parameters, but {len(split)} are split over ranks of "
            f"the model: {', '.join(sorted(split)[:5])}; use one of "
            f"{', '.join(sorted(ELEMENTWISE))}, or whole=False if its update is element-wise"
        )
    return needs


def _is_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.optim.")


def _refuse_differentiable(optimizer: object) -> None:
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        if group.get("differentiable"):
            raise LayoutError(
                f"param group {number} of {type(optimizer).__name__} is differentiable, but what "
                f"follows its step, the gather of parameters, has no gradient; set it to False"
            )
