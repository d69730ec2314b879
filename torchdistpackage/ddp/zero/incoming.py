"""One bucket's gradients on their way in: this rank's own, whole, before they are summed.

One rule: a gradient is here from the moment it is complete until the bucket leaves, and `.grad`
is its view for just as long; then it belongs to whoever sums it, and `.grad` is None.
"""

from collections.abc import Callable

from torchdistpackage.ddp.grad_bucket import GradBucket
from torchdistpackage.ddp.zero.param_shard import FlatLayout


class GradBuffer(GradBucket):
    """Gradients on the `line` that the parameters are on.

    freed: give the memory back while it holds nothing. begins: called before the first gradient
    comes in.
    """

    def __init__(self, line: FlatLayout, freed: bool, begins: Callable[[], object]):
        divide = line.members[0].divide
        super().__init__(line.members, line.offsets, line.num_elements, divide=divide)
        self._freed, self._at_first = freed, begins
        self.empty = True

    def allocate(self) -> None:
        if self.empty:
            self.empty = False
            self._at_first()
            self.have_memory()

    def have_memory(self) -> None:
        """What lies between members stays as it is: nobody looks at its sum."""
        if self._freed:
            self.flat.untyped_storage().resize_(self._num_bytes)

    def release(self) -> None:
        """They have left: no `.grad` shows the memory any more."""
        for shared in self.members:
            shared.parameter.grad = None
        self._divided.clear()
        self.empty = True

    def free(self) -> None:
        """The sum has been made, so the memory may go."""
        if self._freed:
            self.flat.untyped_storage().resize_(0)

    def zero(self) -> None:
        """Set to zero what is here."""
        for shared, view in zip(self.members, self.views, strict=True):
            if shared.parameter.grad is view:
                view.zero_()
