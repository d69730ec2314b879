"""The memory of one bucket: gradients side by side, each the `.grad` of its parameter.

A parameter's `.grad` is a view of the bucket or nothing. What autograd or the user put there
instead (a fresh one, after `set_to_none`) is copied in and dropped.
"""

from collections.abc import Sequence

from torchdistpackage.ddp.shared import Shared
from torchdistpackage.errors import CommError


class Gradients:
    """`flat` holds `num_elements`; the gradient of member i begins at `offsets[i]`."""

    def __init__(self, members: Sequence[Shared], offsets: Sequence[int], num_elements: int):
        self.members = tuple(members)
        self.flat = members[0].parameter.new_zeros(num_elements)
        self.views = [m.view(self.flat, at) for m, at in zip(members, offsets, strict=True)]

    def adopt(self, place: int) -> None:
        """Move the gradient that autograd or the user made for this member in here."""
        shared = self.members[place]
        parameter = shared.parameter
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise CommError(
                f"parameter {shared.name} has a sparse gradient, which buckets cannot "
                f"hold; use Embedding(sparse=False)"
            )
        self.views[place].copy_(grad)
        parameter.grad = self.views[place]

    def complete(self) -> list[int]:
        """Bring in what is elsewhere, zeros for members without gradient; returns these."""
        without: list[int] = []
        for place, (shared, view) in enumerate(zip(self.members, self.views, strict=True)):
            if shared.parameter.grad is None:
                view.zero_()
                without.append(place)
            elif shared.parameter.grad is not view:
                self.adopt(place)
        return without
