"""The base of modules that talk over a group.

One rule: a module gets its group when it is made and keeps it.
"""

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.parallel.tensor.marked import Marked


class Grouped(Marked):
    """A module with a `group`, and the mesh `axis` that it runs along and layouts name.

    group: None means the group of `tpc` along `axis`, or everybody where `tpc` is not set up; it is
        looked up here, once.
    """

    group: Group

    def __init__(self, group: Group | None = None, axis: str = "tensor"):
        super().__init__()
        self.group = resolve_group(group, axis)
        self.axis = axis
