"""`test_comm` where something was made wrong on purpose. The ranks of several tests call it."""

import pytest

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness.comm_test import test_comm


def fails(config: tuple[tuple[str, int], ...], change, pairs: bool = False, **limit: float) -> str:
    """What test_comm says on this rank after `change(patch)`."""
    tpc.setup_process_groups(list(config))
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        with pytest.raises(CommError) as caught:
            test_comm(pairs=pairs, **limit)
    return str(caught.value)
