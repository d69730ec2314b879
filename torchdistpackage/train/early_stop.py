"""End a run when a validated value has stopped improving, by the rule of transformers'
`EarlyStoppingCallback`.

The value is equal on all ranks, and so are the decisions, without messages. Their basis is saved
with each checkpoint (`BestSoFar`), so a resumed run decides like one that never stopped.
"""

import math
from collections.abc import Mapping

from torchdistpackage.checkpoint.commit import folder_name
from torchdistpackage.config.schema import EarlyStopSection
from torchdistpackage.errors import ConfigError
from torchdistpackage.run_files import CHECKPOINTS
from torchdistpackage.train.loop import Callback, Loop
from torchdistpackage.train.train_state import BestSoFar


class EarlyStop(Callback):
    """Follows one validated value, saves the best step, and ends the run by `patience`.

    Raises:
        ConfigError: the run does not measure the value; on all ranks.
    """

    def __init__(self, section: EarlyStopSection):
        assert section.metric is not None
        self._metric, self._section = section.metric, section

    def on_begin(self, loop: Loop) -> None:
        best = loop.state.best
        if best is None or best.metric != self._metric:
            # values of another metric say nothing of this one
            loop.state.best = BestSoFar(self._metric)
        else:
            self._end_if_due(loop, best)

    def on_validated(self, loop: Loop, values: Mapping[str, float]) -> None:
        best = loop.state.best
        assert best is not None
        # a value that was there before, such as a correlation, may be undefined for once
        if self._metric not in values and not best.validated_step:
            raise ConfigError(
                f"train.early_stop.metric={self._metric} is not a value that a validation of this "
                f"run measures; name one of {', '.join(values)}"
            )
        step, value = loop.state.step, values.get(self._metric, math.nan)
        if step <= best.validated_step:
            return  # a complete run that was started again validates its last step once more
        gain = self._gain(best, value)
        is_better = gain > 0
        loop.state.best = best = BestSoFar(
            self._metric,
            value if is_better else best.value,
            step if is_better else best.step,
            0 if gain > self._section.min_delta else best.num_unimproved + 1,
            step,
        )
        if is_better and loop.saves:
            loop.ask_to_save()
        loop.log.note(best_step=best.step)
        self._end_if_due(loop, best)

    def _gain(self, best: BestSoFar, value: float) -> float:
        """Return by how much `value` improves on the best so far; a non-finite value never
        improves, the first always does.
        """
        if not math.isfinite(value):
            return -math.inf
        if best.value is None:
            return math.inf
        return value - best.value if self._section.is_greater_better else best.value - value

    def _end_if_due(self, loop: Loop, best: BestSoFar) -> None:
        section = self._section
        if best.num_unimproved < section.patience:
            return
        by = f" by more than {section.min_delta:g}" if section.min_delta else ""
        at = "no validation was finite"
        if best.value is not None:
            saved = f", {CHECKPOINTS}/{folder_name(best.step)}" if loop.saves else ""
            at = f"the best was {best.value:.6g} at step {best.step}{saved}"
        loop.end_early(
            f"stopped early at step {best.validated_step}: {self._metric} has not improved{by} in "
            f"{best.num_unimproved} validations; {at}"
        )
