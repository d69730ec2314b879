"""Every exception this package raises on purpose.

TorchDistError
  ConfigError        values in the YAML file or on the command line are wrong
  TopologyError      the requested axes do not tile the ranks
  LayoutError        a tensor does not divide over the axes it is split on
  ScheduleError      a pipeline program is incomplete, out of order or stuck
  LaunchError        the environment does not say who this process is, or ranks are missing
    AbsentError      ranks are missing, by number
    HeldError        another process writes to the run folder
  RankError          a rank that this process started failed, hung or was killed
  CommError          a message or a group is not what the peers agreed on
  RaceError          a program breaks a rule of asynchronous calls, found under the late transport
  PlacementError     a placed program mixes places, or names a device that is not there
  DataError          the data does not give what the run asks of it
  CheckpointError    a checkpoint is missing, damaged or of another run
  NonFiniteError     a loss or a gradient is not a finite number
  NotAvailableError  a name of an earlier library is used that is not available yet

Each message gives, in this order: what was wrong and where, the numbers that show
it, and what to change. An `assert` means a bug in this package, never in its input.
"""

import typing


class TorchDistError(Exception):
    """Base class: catch this to catch everything above."""


class ConfigError(TorchDistError, ValueError):
    """Values in the YAML file or on the command line are wrong; the text lists them all."""


class TopologyError(TorchDistError, ValueError):
    """The requested axes do not tile the ranks."""


class LayoutError(TorchDistError, ValueError):
    """A tensor does not divide over the axes it is split on."""


class ScheduleError(TorchDistError, ValueError):
    """A pipeline program is incomplete, out of order or stuck."""


class LaunchError(TorchDistError, RuntimeError):
    """The environment does not say who this process is, or ranks never came."""


class AbsentError(LaunchError):
    """Ranks never came. found: which. speaker: a rank that came, for who wants to say it once."""

    def __init__(self, text: str, found: str = "", speaker: int = 0) -> None:
        super().__init__(text)
        self.found, self.speaker = found, speaker


class HeldError(LaunchError):
    """Another process writes to the run folder, or submits the run; names it and how to end it."""


class RankError(TorchDistError, RuntimeError):
    """A rank that this process started failed, hung or was killed; names the first culprit.

    culprit: its `torchdistpackage.environment.failure.Failure`, where a pool's rank ended by one.
    """

    culprit: typing.Any = None


class CommError(TorchDistError, RuntimeError):
    """A message or a group is not what the peers agreed on."""


class RaceError(TorchDistError, AssertionError):
    """A program breaks a rule of asynchronous calls; the late transport of the tests found it."""


class PlacementError(TorchDistError, ValueError, TypeError):
    """A placed program mixes places, moves what cannot move, or names a device not there."""


class DataError(TorchDistError, ValueError):
    """The data does not give what the run asks of it."""


class CheckpointError(TorchDistError, RuntimeError):
    """A checkpoint is missing, damaged or belongs to another run."""


class NonFiniteError(TorchDistError, ArithmeticError):
    """A loss or a gradient is not a finite number; names rank, stage and parameter."""


class NotAvailableError(TorchDistError, NotImplementedError, AttributeError):
    """A name of an earlier library is used that is not available yet; says why.

    An AttributeError too, so that `hasattr` of what stands for the name answers no.
    """
