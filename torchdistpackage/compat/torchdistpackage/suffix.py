"""The end of a file's name for what one rank of a model saves by torch.save.

One rule: ranks that hold different parameters write different names, and replicas the same one. The
checkpoints of this package need none: each is a folder that says who wrote what.
"""

from torchdistpackage.comm.tpc import tpc


def get_mp_ckpt_suffix() -> str:
    """`_tp_1_pp_0.pth` for tensor index 1 and pipeline index 0; an axis of one rank is left out."""
    places = (("tp", "tensor"), ("pp", "pipe"))
    used = [
        f"_{short}_{tpc.get_group_rank(axis)}" for short, axis in places if tpc.is_mode_inited(axis)
    ]
    return "".join(used) + ".pth"
