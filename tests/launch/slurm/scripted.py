"""A Slurm that says what a test wants it to say: as a function, or as programs to be found."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.query import CompletedCommand

NO_ACCOUNTING = CompletedCommand(1, "", "Slurm accounting storage is disabled\n")
UNHEARD_OF = CompletedCommand(0)
"""squeue is silent about ids that it does not know, if there are two of them."""

Answer = CompletedCommand | str | LaunchError | Callable[[Sequence[str]], "Answer"]


class Scripted:
    """Answers by the command's name; a text stands for success. Keeps what it was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers: dict[str, Answer] = {
            "squeue": UNHEARD_OF,
            "sacct": NO_ACCOUNTING,
            "scancel": "",
            "scontrol": CompletedCommand(1, "", "Unable to contact slurm controller\n"),
            **answers,
        }
        self.asked: list[list[str]] = []
        self.envs: list[Mapping[str, str] | None] = []

    def __call__(
        self, args: Sequence[str], env: Mapping[str, str] | None = None
    ) -> CompletedCommand:
        self.asked.append(list(args))
        self.envs.append(env)
        answer = self.answers[args[0]]
        while callable(answer):
            answer = answer(args)
        if isinstance(answer, LaunchError):
            raise answer
        return CompletedCommand(0, answer) if isinstance(answer, str) else answer

    def count(self, command: str) -> int:
        return sum(args[0] == command for args in self.asked)


def ids_of(args: Sequence[str]) -> list[str]:
    """The jobs that squeue is asked for, each once."""
    return list(dict.fromkeys(args[-1].split(",")))


def row(job: str, state: str, *, code: int = 0, used: str = "0:01", nodes: str = "n1") -> str:
    """A line of squeue; nobody needs the padding."""
    return f"{job}|{state}|0|{code}|{used}|{nodes}|None|\n"


class Programs:
    """Slurm's commands as programs in `folder`, which belongs into PATH. What they were asked is
    kept there; until they are told what to say, no job is known."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked = folder / "asked"
        self._asked.touch()
        self.say("squeue", "")
        self.say("sacct", NO_ACCOUNTING.err, code=1)
        self.say("scancel", "")

    def say(self, command: str, text: str, *, code: int = 0) -> None:
        """From now on `command` writes `text` and ends with `code`."""
        (self.folder / f"{command}.text").write_text(text)
        program = self.folder / command
        program.write_text(
            "#!/bin/sh\n"
            f"printf '%s\\t' {command} \"$@\" >>{self._asked}\n"
            f"echo >>{self._asked}\n"
            f"cat {self.folder}/{command}.text {'>&2' if code else ''}\n"
            f"exit {code}\n"
        )
        program.chmod(0o755)

    @property
    def asked(self) -> list[list[str]]:
        return [line.split("\t")[:-1] for line in self._asked.read_text().splitlines()]
