"""A description made ready for use: what a program that repeats itself asks of it, at once.

One rule: everything that follows from the description alone is worked out when the template is
made, so that a message of known form costs its allocation and its posting, and nothing else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchdistpackage.comm.dtypes import to_bytes
from torchdistpackage.comm.messages import Description, Message


class MessageSpec:
    """Room for a message, the message from its room, and whether another is of the same form.

    num, num_bytes: of all members. wanting: places of those whose gradient comes back.
    """

    __slots__ = (
        "_device", "_made", "_moving", "_moving_back", "_on_host", "_wanted",
        "description", "num", "num_bytes", "wanting",
    )  # fmt: skip

    def __init__(self, description: Description, device: torch.device):
        self.description, self._device = description, device
        self._on_host = device.type == "cpu"
        members = description.members
        self.num = len(members)
        # empty tensors do not travel: the other side makes its own
        self._moving = [i for i, m in enumerate(members) if m is not None and 0 not in m.shape]
        self._made = [(i, torch.Size(m.shape), m.dtype) for i, m in enumerate(members) if m]
        self.num_bytes = sum(shape.numel() * dtype.itemsize for _, shape, dtype in self._made)
        self.wanting = [i for i, m in enumerate(members) if m is not None and m.requires_grad]
        self._wanted = [made for made in self._made if made[0] in self.wanting]
        self._moving_back = [k for k, i in enumerate(self.wanting) if i in self._moving]

    def allocate(self) -> list[Tensor | None]:
        """New memory for all members."""
        room: list[Tensor | None] = [None] * self.num
        for i, shape, dtype in self._made:
            room[i] = torch.empty(shape, dtype=dtype, device=self._device)
        return room

    def allocate_gradients(self) -> list[Tensor]:
        """New memory for the gradients that come back, in the order of `wanting`."""
        return [torch.empty(shape, dtype=t, device=self._device) for _, shape, t in self._wanted]

    def scatter_grads(self, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """One place for each member, None where no gradient is wanted."""
        places: list[Tensor | None] = [None] * self.num
        for i, gradient in zip(self.wanting, gradients, strict=True):
            places[i] = gradient
        return tuple(places)

    def travelling(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Those that go over the wire, as they go: of a message, or of `room()` to be filled."""
        return [to_bytes(tensors[i]) for i in self._moving]  # type: ignore[arg-type]

    def travelling_back(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The same of gradients in the order of `wanting`, or of `allocate_gradients()`."""
        return [to_bytes(gradients[i]) for i in self._moving_back]

    def matches(self, message: Message) -> bool:
        """Whether `message` may go as this form: structure, shapes, dtypes, where the other side
        makes room for it, and no member wants a gradient that is not in the form.

        One that does not want its gradient any more (its stage was frozen) gets it, and drops it.
        """
        description = self.description
        if description.form == "tensor":
            tensors: Sequence[Tensor | None] = (message,)  # type: ignore[assignment]
        elif description.form == "dict":
            if not isinstance(message, dict) or tuple(message) != description.keys:
                return False
            tensors = tuple(message.values())
        elif isinstance(message, tuple | list):
            tensors = message
        else:
            return False
        if len(tensors) != self.num:
            return False
        for x, member in zip(tensors, description.members, strict=True):
            if member is None or not isinstance(x, Tensor):
                if x is not member:
                    return False
            elif (
                x.dtype is not member.dtype
                or (x.requires_grad and not member.requires_grad)
                or x.shape != member.shape
                or x.is_cpu is not self._on_host
            ):
                return False
        return True
