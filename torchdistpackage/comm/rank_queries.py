"""A rank's questions about its groups, answered by the ranks of its group alone.

A known axis that the topology leaves out is one of size 1, in every answer.
"""

from abc import ABC, abstractmethod


class RankQueries(ABC):
    """What `tpc` answers once it knows its own rank and the ranks of a mode."""

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @abstractmethod
    def get_ranks_in_group(self, mode: str) -> list[int]: ...

    @abstractmethod
    def all_ranks(self, mode: str) -> list[list[int]]: ...

    def all_dp_ranks(self) -> list[list[int]]:
        return self.all_ranks("data")

    def get_group_rank(self, mode: str) -> int:
        """My position in my group; 0 for an axis that the config does not list."""
        return self.get_ranks_in_group(mode).index(self.rank)

    def get_group_size(self, mode: str) -> int:
        """Number of ranks in my group; 1 for an axis that the config does not list."""
        return len(self.get_ranks_in_group(mode))

    def get_tp_rank(self) -> int:
        return self.get_group_rank("tensor")

    def get_pp_rank(self) -> int:
        return self.get_group_rank("pipe")

    def get_dp_rank(self) -> int:
        return self.get_group_rank("data")

    def get_mp_rank(self) -> int:
        return self.get_group_rank("model")

    def get_tp_size(self) -> int:
        return self.get_group_size("tensor")

    def get_pp_size(self) -> int:
        return self.get_group_size("pipe")

    def get_dp_size(self) -> int:
        return self.get_group_size("data")

    def get_mp_size(self) -> int:
        return self.get_group_size("model")

    def is_first_in_group(self, mode: str) -> bool:
        return self.get_group_rank(mode) == 0

    def is_last_in_group(self, mode: str) -> bool:
        return self.get_group_rank(mode) == self.get_group_size(mode) - 1

    def is_first_in_tensor_group(self) -> bool:
        return self.is_first_in_group("tensor")

    def is_last_in_tensor_group(self) -> bool:
        return self.is_last_in_group("tensor")

    def is_first_in_pipeline_group(self) -> bool:
        return self.is_first_in_group("pipe")

    def is_last_in_pipeline_group(self) -> bool:
        return self.is_last_in_group("pipe")

    def is_first_in_data_group(self) -> bool:
        return self.is_first_in_group("data")

    def is_last_in_data_group(self) -> bool:
        return self.is_last_in_group("data")

    def is_first_in_model_group(self) -> bool:
        return self.is_first_in_group("model")

    def is_last_in_model_group(self) -> bool:
        return self.is_last_in_group("model")

    def get_prev_global_rank(self, mode: str = "pipe") -> int:
        """The rank before me in my group, the last one before the first."""
        return self._beside(mode, -1)

    def get_next_global_rank(self, mode: str = "pipe") -> int:
        """The rank after me in my group, the first one after the last."""
        return self._beside(mode, 1)

    def is_first_group(self, mode: str) -> bool:
        """Whether mine is the first group of its kind: the one with rank 0."""
        return 0 in self.get_ranks_in_group(mode)

    def _beside(self, mode: str, step: int) -> int:
        ranks = self.get_ranks_in_group(mode)
        return ranks[(ranks.index(self.rank) + step) % len(ranks)]
