"""A rank that joins and leaves, once per scenario: join_all.py FOLDER SCENARIOS.

SCENARIOS is JSON: a list of {"name", "env": variables to set, "absent": ranks that stay away,
"limit_s"}. What each rank saw goes to FOLDER/NAME.RANK.json.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives
from torchdistpackage.comm.runtime import join, leave
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import LaunchError

NUM_FLOATS = 1 << 20


def received_bytes() -> dict[str, int]:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    cards = (line.split(":") for line in lines)
    return {card.strip(): int(counts.split()[0]) for card, counts in cards}


def meet(limit_s: float) -> dict[str, object]:
    joined = join(detect(os.environ), init_timeout_s=limit_s)
    before = received_bytes()
    total = primitives.all_reduce(torch.ones(NUM_FLOATS), dist.group.WORLD)
    after = received_bytes()
    leave()
    return {
        "total": float(total.sum()) / NUM_FLOATS,
        "port": joined.port,
        "ports": joined.rendezvous.ports,
        "notes": joined.notes,
        "told": [os.environ.get(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "NCCL")],
        "received_bytes": {card: after[card] - before[card] for card in after},
    }


def main(folder: Path, scenarios: list[dict]) -> None:
    plain = dict(os.environ)
    rank = detect(plain).rank
    for scenario in scenarios:
        os.environ.clear()
        os.environ.update(plain | scenario.get("env", {}))
        begin = time.monotonic()
        seen: dict[str, object] = {"host": socket.gethostname()}
        if rank not in scenario.get("absent", []):
            try:
                seen |= meet(scenario.get("limit_s", 60.0))
            except LaunchError as error:
                seen["error"] = str(error)
        seen["took_s"] = time.monotonic() - begin
        (folder / f"{scenario['name']}.{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
