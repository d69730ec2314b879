"""NaiveDDP and ZeRO at world 1 beside the bare step: what they add to it.

All sides compute the same, from the same weights, and take turns; the device is idle before and
after each.
"""

from collections.abc import Callable

from benchmarks.gpu.here import Here
from benchmarks.gpu.models import adamw, batch, gpt, loss_of, sizes
from benchmarks.gpu.rows import Found
from benchmarks.turns import ratio
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

BAR = 1.01
ROUNDS, STEPS, WARM_UP = 15, 4, 6
LOSS = 2e-3
"""How far a loss may be from the bare one's, relative: bf16 products in another order."""
BARE = "bare"


def measure(here: Here, found: Found) -> None:
    here.join()
    name = sizes(here)[0]
    data = batch(here, name)
    steps: dict[str, Callable[[], object]] = {}
    losses: dict[str, float] = {}
    for side, make in MAKERS.items():
        with found.case(side):
            own = gpt(here, name)
            model, optimizer = make(own)

            def step(model=model, own=own, optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(here, model, own, data)
                loss.backward()
                optimizer.step()
                return loss

            for _ in range(WARM_UP):
                loss = step()
            losses[side], steps[side] = loss.item(), step
    times = here.in_turns(steps, ROUNDS, STEPS)
    for side, spread in times.items():
        issue_s = here.issue_s(steps[side])
        value, _ = ratio(spread, times[BARE])
        off = abs(losses[side] / losses[BARE] - 1)
        text = (
            f"{spread['median']:.2f} ms a step, {value:.4f} of the bare one; the host "
            f"{1e3 * issue_s:.2f} ms; loss off by {off:.1e}"
        )
        numbers = {"ms": spread["median"], "ratio": value, "host_s": issue_s, "loss_off": off}
        if off > LOSS:
            found.judge(side, False, text, **numbers)
        elif side == BARE:
            found.show(side, text, **numbers)
        else:
            found.judge_time(side, value <= BAR, text, bar=BAR, **numbers)
    here.leave()


def _zero(stage: int):
    def make(own):
        return own, ZeroOptimizer(adamw(own.parameters()), own, stage=stage)

    return make


def _naive(own):
    model = NaiveDDP(own)
    return model, adamw(model.parameters())


MAKERS = {
    BARE: lambda own: (own, adamw(own.parameters())),
    "NaiveDDP": _naive,
    "ZeRO 1": _zero(1),
    "ZeRO 2": _zero(2),
    "ZeRO 3": _zero(3),
}
