"""The table of `tdp plan --bytes`: the communication of a step."""

from torchdistpackage.cli._common import wrap
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.traffic import between_nodes, busiest, uncounted
from torchdistpackage.text import text_table


def traffic_table(plan: Plan, ranks_per_node: int | None = None) -> list[str]:
    """Return the bytes of a step by axis and call; [] if there is one rank.

    ranks_per_node: tells apart the bytes of calls whose ranks are on several nodes.
    """
    if plan.world_size == 1:
        return []
    if (why := uncounted(plan)) is not None:
        return [wrap(f"bytes of a step    {why}", indent=" " * 19)]
    rank, calls = busiest(plan)
    rows = [["axis", "call", "dtype", "calls", "bytes"]]
    if ranks_per_node is not None:
        rows[0].append("between nodes")
    for axis in dict.fromkeys(x.axis for x in calls):
        kinds = dict.fromkeys((x.operation, x.dtype) for x in calls if x.axis == axis)
        for operation, dtype in kinds:
            same = [x for x in calls if (x.axis, x.operation, x.dtype) == (axis, operation, dtype)]
            number, num_bytes = sum(x.number for x in same), sum(x.num_bytes for x in same)
            rows.append([axis, operation, dtype, f"{number:,}", f"{num_bytes:,.0f}"])
            if ranks_per_node is not None:
                rows[-1].append(f"{between_nodes(same, ranks_per_node):,.0f}")
    head = f"communication per step on rank {rank} (first rank of the busiest stage)"
    if any(x.axis == "expert" for x in calls):
        head += "; for axis expert the mean over ranks"
    return [f"{wrap(head)}\n{text_table(rows)}"]
