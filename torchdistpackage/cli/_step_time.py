"""The predicted step time as `tdp plan` prints it: one line of its summary, or all terms."""

from pathlib import Path

from torchdistpackage.cli._common import wrap
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.profile import Profile
from torchdistpackage.plan.compare import ComparedTerm, RunComparison, compare_run
from torchdistpackage.plan.measured import measured_device, measured_fabric
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.step_time import RunTime, device_of, run_time, unpredicted
from torchdistpackage.predict.devices import DEVICES, Accelerator
from torchdistpackage.predict.published import is_checked
from torchdistpackage.predict.step import StepTime

Prediction = tuple[Accelerator, RunTime | str]
"""A device with the times on it, or why they are not known."""
_WIDTH = 21
"""Columns of the names of terms."""
_LEAST_S = 1e-9
"""A term below is the rounding of a difference."""


def predicted(
    plan: Plan,
    name: str | None,
    ranks_per_node: int | None,
    profile: tuple[Path, Profile] | None = None,
) -> Prediction | None:
    """Predict a step once for both; None if neither the file nor `name` says a device.

    profile: measured, with its path; its device is taken unless `name` says another one.

    Raises:
        ConfigError: no device has that name, or the profile is that of another one.
    """
    if profile is not None and name is None:
        path, cluster = profile
        device = measured_device(cluster, plan.config, path, plan.world_size, ranks_per_node)
        if (why := unpredicted(plan)) is not None:
            return device, why
        fabric = measured_fabric(cluster, device, ranks_per_node)
        return device, run_time(plan, device, ranks_per_node, fabric)
    device = device_of(plan.config, name)
    if device is None:
        return None
    if (why := unpredicted(plan)) is not None:
        return device, why
    return device, run_time(plan, device, ranks_per_node)


def summary_line(estimate: Prediction) -> str:
    """Return the step time for the summary."""
    device, time = estimate
    if isinstance(time, str):
        return time
    return (
        f"{seconds_text(time.step.total)} predicted on {device.name}, {time.gpu_hours:,.3g} "
        f"GPU-hours in all; --time prints its terms"
    )


def time_table(estimate: Prediction | None) -> str:
    """Return the terms of the step, the GPU-hours of the run, and whether its job is long enough.

    Raises:
        ConfigError: no device is named.
    """
    device, time = _known(estimate, "--time")
    head = f"predicted step on {device.title} ({device.name})"
    if isinstance(time, str):
        return f"{head}\n" + wrap(f"  {time}", indent="  ")
    total = time.step.total
    lines = [
        f"  {term:<{_WIDTH}}{seconds_text(seconds):>10} {seconds / total:7.1%}"
        for term, seconds in time.step.terms.items()
        if seconds > _LEAST_S
    ]
    lines.append(f"  {'step':<{_WIDTH}}{seconds_text(total):>10}")
    notes = [
        ("speed", f"{time.step_tokens / total:,.0f} tokens a second, MFU {time.utilization:.1%}"),
        ("run", _run(time)),
        *(("job", text) for text in _job(time)),
        *(("matmuls", text) for text in time.unmeasured),
        ("checked", _checked(device, time.step)),
    ]
    lines += [wrap(f"  {label:<9}{text}", indent=" " * 11) for label, text in notes]
    return "\n".join([head, *lines])


def compare_table(plan: Plan, estimate: Prediction | None, folder: Path) -> str:
    """Return the predicted terms beside those of the run in `folder`, the one that was wrong, and
    the number that would explain it.

    Raises:
        ConfigError: no device is named, the step is not predicted, or the run does not fit the
            plan.
    """
    device, time = _known(estimate, "--compare")
    if isinstance(time, str):
        raise ConfigError(f"--compare has no prediction to compare with: {time}")
    compared = compare_run(plan, time.prediction, folder)
    first, last = compared.steps
    lines = [
        wrap(f"{folder}, median of steps {first} to {last}, beside {device.name}"),
        f"  {'term':<{_WIDTH}}{'predicted':>10}{'measured':>10}{'difference':>12}",
        *(
            _compared(term)
            for term in (*compared.terms, compared.step)
            if max(term.predicted_s, term.measured_s) > 1e-6
        ),
        wrap(f"  wrong    {_wrong(compared)}", indent=" " * 11),
    ]
    if compared.wrong is not None:
        text = _explained(compared, "the profile" if device.call_s else device.name)
        lines.append(wrap(f"  number   {text}", indent=" " * 11))
    return "\n".join(lines)


def _compared(term: ComparedTerm) -> str:
    sign = "-" if term.difference_s < 0 else "+"
    return (
        f"  {term.name:<{_WIDTH}}{seconds_text(term.predicted_s):>10}"
        f"{seconds_text(term.measured_s):>10}"
        f"{sign + seconds_text(abs(term.difference_s)):>12}"
    )


def _wrong(compared: RunComparison) -> str:
    if (term := compared.wrong) is None:
        return "no term differs by 2% of the step or more"
    share = abs(term.difference_s) / compared.step.measured_s
    more = "more" if term.difference_s > 0 else "less"
    return (
        f"{term.name} takes {seconds_text(abs(term.difference_s))} {more} than predicted, "
        f"{share:.0%} of the step"
    )


def _explained(compared: RunComparison, where: str) -> str:
    if (number := compared.explanation) is None:
        return "no change of a single number explains it"
    return (
        f"{number.name} of {number.after:.3g} in place of {number.before:.3g} in {where} would "
        f"explain it"
    )


def _known(estimate: Prediction | None, option: str) -> Prediction:
    if estimate is None:
        raise ConfigError(
            f"{option} needs a device: pass --device NAME, or name the type of GPU in "
            f"launch.slurm, such as gpus-per-node: h100:8, or pass --profile FILE that tdp comm "
            f"bench --profile measured; the devices are {', '.join(DEVICES)}"
        )
    return estimate


def seconds_text(seconds: float) -> str:
    """Return a time in seconds or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _run(estimate: RunTime) -> str:
    return (
        f"{estimate.steps:,} steps take {estimate.run_seconds / 3600:,.3g} h, "
        f"{estimate.gpu_hours:,.3g} GPU-hours, without validations and checkpoints"
    )


def _job(estimate: RunTime) -> list[str]:
    """Return whether the run ends within the time of its job."""
    if estimate.job_seconds is None or estimate.steps_of_job is None:
        return []
    hours = estimate.job_seconds / 3600
    if estimate.steps_of_job >= estimate.steps:
        return [f"ends within its {hours:,.3g} h"]
    return [
        f"does not end within its {hours:,.3g} h, in which {estimate.steps_of_job:,} steps fit; "
        f"raise launch.slurm.time or let launch.requeue go on"
    ]


def _checked(device: Accelerator, step: StepTime) -> str:
    if device.call_s is not None:
        return f"numbers of {device.source}; no published step says how near this is"
    page = "docs/predicted_steps.md has published steps and errors"
    text = f"{page} of this device"
    if not is_checked(device.name):
        text = f"not checked: no published step of this device is known; {page} of others"
    if step.terms["host and framework"] > step.total / 2:
        text += "; mostly host time, which one row checks"
    return text
