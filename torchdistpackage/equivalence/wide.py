"""Compute in float64 what code computes in float32, whatever the precision of the run.

Norms, routers and rotary tables of transformers go on in float32 by themselves. Two layouts that
add up in another order then differ by its rounding, which recurrences and gates that are
exponentials enlarge without a bound, so no tolerance tells a wrong split from a right one.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

_NAMES = ("float", "float32")


@contextmanager
def float64_within() -> Iterator[None]:
    """Let code in the block that asks torch for float32 get float64.

    What names the type by itself at import, or of a tensor, still gets float32.
    """
    default_dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, default_dtype)
        torch.set_default_dtype(torch.float64)
        for name in _NAMES:
            stack.enter_context(patch.object(torch, name, torch.float64))
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield
