"""What a plan says of several sources."""

from collections.abc import Sequence

from torchdistpackage.cli._common import text_table
from torchdistpackage.config.check import bytes_there
from torchdistpackage.train.plan import Plan


def sources_text(plan: Plan) -> list[str]:
    """Of each of several sources what the run reads of it, and its size where it is here."""
    blend, config = plan.config.data.blend, plan.config
    if not blend:
        return []
    train, total = config.train, sum(x.weight for x in blend)
    number = train.steps * config.data.global_batch
    rows: list[Sequence[object]] = [("source", "samples", "part", "holds", "MB", "path")]
    for label, weight, section in blend:
        part, size_bytes = weight / total, bytes_there(section)
        size = "" if size_bytes is None else f"{size_bytes / 1e6:,.1f}"
        row = (
            label,
            f"{round(part * number):,}" if train.epochs is None else "",
            f"{part:.1%}",
            section.name,
            size,
            section.path,
        )
        rows.append(row)
    table = text_table(rows, num_left=1, last_left=True)
    if train.epochs is not None:
        return [f"{train.epochs:g} passes over {len(blend)} sources\n{table}"]
    return [f"{number:,} samples in {train.steps:,} steps, of {len(blend)} sources\n{table}"]
