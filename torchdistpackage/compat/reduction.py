"""A sum over a group as the earlier libraries have it: into the input, where autograd allows it.

One rule: what autograd holds is never written to. An input that needs a gradient stays as it is,
and the sum is a new tensor.
"""

import torch
from torch import Tensor

from torchdistpackage.comm import collectives, primitives
from torchdistpackage.comm.primitives import Group


def all_reduce_(x: Tensor, group: Group) -> Tensor:
    """The sum over the group: in `x` itself unless it needs a gradient, which then passes."""
    if torch.is_grad_enabled() and x.requires_grad:
        return collectives.reduce(x, group)
    return summed_in_place(x, group)


def summed_in_place(x: Tensor, group: Group) -> Tensor:
    """`x`, overwritten by its sum over the group and unseen by autograd."""
    primitives.all_reduce(x.detach(), group)
    return x
