"""What stepping costs by the size of a bucket, in ZeRO and NaiveDDP, as one rank of four.

Nothing travels, so what is seen is the host's and the device's own part; a link's part comes on
top.
"""

import torch

from benchmarks.gpu.here import Here
from benchmarks.gpu.mirror import world
from benchmarks.gpu.models import adamw, batch, gpt, loss_of, sizes
from benchmarks.gpu.rows import Found
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

CAPS_MB = (1, 4, 8, 16, 32, 64, 128)
SMALL_CAPS_MB = (0.01, 0.1)
SEVERAL = 4
ROUNDS = 5


def measure(here: Here, found: Found) -> None:
    name = sizes(here)[0]
    with world(here, SEVERAL):
        tpc.setup_process_groups([("data", SEVERAL)])
        data = batch(here, name)
        with found.case("bare"):
            own = gpt(here, name)
            _time(here, found, "bare", own, own, adamw(own.parameters()), data)
        for cap in SMALL_CAPS_MB if here.small else CAPS_MB:
            with found.case(f"ZeRO 1, {cap} MiB"):
                own = gpt(here, name)
                optimizer = ZeroOptimizer(adamw(own.parameters()), own, bucket_cap_mb=cap)
                _time(here, found, f"ZeRO 1, {cap} MiB", own, own, optimizer, data)
                optimizer.remove()
            with found.case(f"NaiveDDP, {cap} MiB"):
                own = gpt(here, name)
                model = NaiveDDP(own, bucket_cap_mb=cap)
                _time(
                    here, found, f"NaiveDDP, {cap} MiB", model, own, adamw(own.parameters()), data
                )
                model.reducer.remove()


def _time(here: Here, found: Found, name: str, model, own, optimizer, data) -> None:
    """Host and device, of the backward and of the step, apart."""
    taken: dict[str, list[float]] = {"backward": [], "step": [], "step, host": []}
    for turn in range(ROUNDS + 4):
        optimizer.zero_grad()
        loss: torch.Tensor = loss_of(here, model, own, data)
        taken["backward"].append(here.seconds(loss.backward))
        taken["step"].append(here.seconds(optimizer.step))
        if turn % 2:
            optimizer.zero_grad()
            loss_of(here, model, own, data).backward()
            taken["step, host"].append(_host_s(here, optimizer.step))
    found.show(
        name,
        ", ".join(f"{what} {1e3 * sorted(x)[len(x) // 2]:.2f} ms" for what, x in taken.items()),
        **{what: sorted(x)[len(x) // 2] for what, x in taken.items()},
    )


def _host_s(here: Here, step) -> float:
    import time

    here.sync()
    begin = time.perf_counter()
    step()
    took_s = time.perf_counter() - begin
    here.sync()
    return took_s
