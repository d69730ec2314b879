"""TensorBoard: event files in `tensorboard/` of the run folder.

It can rewind: a file that begins with a purge makes its readers drop every later step read before.
So a step counts as delivered once its events are in the file, and a resumed run continues from
there, or from its checkpoint if that is earlier.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from torchdistpackage.launch.run_rows import Row
from torchdistpackage.train.trackers.tracker import TrackedRun, TrackerState, scalars, texts

_PNG = b"\x89PNG\r\n\x1a\n"
_RGBA = 4


class TensorBoardTracker:
    """Implements `Tracker`."""

    name = "tensorboard"

    def open(self, run: TrackedRun) -> int:
        self._state = TrackerState.of(run.folder, self.name)
        self._folder = run.folder / self.name
        last = min(self._state.step, run.step)
        self._writer = SummaryWriter(str(self._folder), purge_step=last + 1)
        mark = hashlib.sha256(repr(sorted(run.config.items())).encode()).hexdigest()
        if mark != self._state.values.get("config"):
            self._add_config(run.config, last)
        self._writer.flush()
        self._state.keep(step=last, config=mark)
        return last

    def _add_config(self, config: Mapping[str, Any], step: int) -> None:
        lines = (f"    {key}: {json.dumps(value)}" for key, value in config.items())
        self._writer.add_text("config", "\n".join(lines), step)
        plain = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in config.items()}
        for summary in hparams(plain, {}):  # for the tab of hyperparameters
            self._writer._get_file_writer().add_summary(summary)

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for tag, value in scalars(row):
                self._writer.add_scalar(tag, value, row["step"])
            for tag, text in texts(row):
                self._writer.add_text(tag, text, row["step"])
        self._writer.flush()
        self._state.keep(step=max(self._state.step, rows[-1]["step"]))

    def add_picture(self, path: Path, step: int) -> None:
        """Add a PNG; an SVG is skipped, because TensorBoard does not show it."""
        data = path.read_bytes()
        if not data.startswith(_PNG):
            return
        width, height = struct.unpack(">II", data[16:24])
        image = Summary.Image(
            height=height, width=width, colorspace=_RGBA, encoded_image_string=data
        )
        summary = Summary(value=[Summary.Value(tag=path.stem, image=image)])
        self._writer._get_file_writer().add_summary(summary, step)

    def close(self, outcome: str) -> None:
        self._writer.close()

    @property
    def place(self) -> str:
        return f"tensorboard --logdir {self._folder}"
