"""How groups end: not before all of their members have them."""

import time

import pytest
import torch.distributed as dist

from torchdistpackage.comm.groups import Groups

LATE_S = 0.3


def ended_at_once(comes_back: bool) -> None:
    """Rank 1 is still on its way out of making the group when rank 0 ends it."""
    made = Groups(dist.get_rank())
    store, plain = dist.distributed_c10d._get_default_store(), dist.new_group

    def slowly(*args, **kwargs):
        group = plain(*args, **kwargs)
        time.sleep(LATE_S)
        store.set("rank 1 has it", "")
        if not comes_back:
            raise ValueError("rank 1 fails")
        return group

    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", slowly)
            if not comes_back:
                with pytest.raises(ValueError, match="rank 1 fails"):
                    made.of([0, 1], use="short")
                return
            made.of([0, 1], use="short")
    else:
        made.of([0, 1], use="short")
        began = time.monotonic()
        made.destroy()
        assert store.check(["rank 1 has it"])
        assert time.monotonic() - began < 10
    made.destroy()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_group_does_not_end_while_a_member_is_still_making_it(ranks, comes_back):
    ranks(2).run(ended_at_once, comes_back)
