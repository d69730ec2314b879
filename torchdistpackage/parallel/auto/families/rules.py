"""Rules that the plans of several families share."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.auto.actions import FirstOnly, Split, StateAction, on_dim
from torchdistpackage.parallel.auto.ops import SizedGather
from torchdistpackage.parallel.auto.rules import Config


class FamilyRules:
    """The four dicts of a plan; names are the ends of dotted paths, as regular expressions."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.state: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}
        self.split: list[str] = []
        self.key_heads: Sequence[Sequence[int]] | None = None
        """Of each shard, those in its key-value cache."""

    def column(self, name: str, action: StateAction | None = None, *, dim: int = 0) -> None:
        """A layer cut by outputs, which stay apart. dim: of its weight that is the outputs'."""
        cut = action or Split(self.world_size, dim)
        self.state[f"{path(name)}\\.weight$"] = cut
        self.state[f"{path(name)}\\.bias$"] = on_dim(cut, 0)

    def enter(self, name: str, *targets: int | str) -> None:
        """Inputs of which the shards go on with parts of layers, the first one by default."""
        for target in targets or (0,):
            self.input(name, target, "copy")

    def input(self, name: str, target: int | str, action: Any) -> None:
        """An action on one input."""
        self.inputs.setdefault(f"{path(name)}$", {})[target] = action

    def same_state(self, name: str, other: str) -> None:
        """A parameter that is tied to another one."""
        self.state[f"{path(name)}$"] = self.state[f"{path(other)}$"]

    def row(self, name: str, action: StateAction | None = None, *, dim: int = 1) -> None:
        """A layer cut by inputs, whose products are summed, and the bias once."""
        self.state[f"{path(name)}\\.weight$"] = action or Split(self.world_size, dim)
        self.state[f"{path(name)}\\.bias$"] = FirstOnly()
        self.outputs[f"{path(name)}$"] = {0: "sum"}

    def embedding(self, name: str, dim: int) -> None:
        """A table cut by columns, whose rows are joined. dim: columns of the whole."""
        self.state[f"{path(name)}\\.weight$"] = Split(self.world_size, 1)
        self.outputs[f"{path(name)}$"] = {0: self.joined(dim)}

    def head(self, name: str, model_config: Any) -> None:
        """The layer that makes logits, whose weight may be an embedding's, cut by columns."""
        if model_config.tie_word_embeddings:
            self.inputs[f"{path(name)}$"] = {0: "split -1"}
            self.row(name)
        else:
            self.column(name)
            self.enter(name)
            self.outputs[f"{path(name)}$"] = {0: self.joined(model_config.vocab_size)}

    def draws_apart(self, *names: str) -> None:
        """Dropout layers on split values, and attention, whose scores are of the shard's heads."""
        self.split += [f"{path(name)}$" for name in names]

    def attribute(self, name: str, **actions: Any) -> None:
        self.attributes[f"{path(name)}$"] = actions

    def joined(self, length: int) -> SizedGather:
        return SizedGather(-1, tuple(even_sizes(length, self.world_size)))

    def config(self) -> Config:
        return Config(
            self.state,
            self.inputs,
            self.outputs,
            self.attributes,
            full_gradients=True,
            split_modules=self.split,
            is_general=True,
            key_heads=self.key_heads,
        )


def path(name: str) -> str:
    """A pattern that begins where a name between dots begins."""
    return rf"(^|\.){name}"
