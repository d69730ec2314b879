"""Methods of a split Hugging Face model that replace those of its family.

transformers, of the extra `hf`, is imported by its user.
"""

import sys
from typing import Any

import torch
from torch import nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.draws import use_draws_of_first
from torchdistpackage.parallel.auto.split_model import ModelSplit, SplitModel


def is_pretrained(module: nn.Module) -> bool:
    """Return whether it is a PreTrainedModel, possibly with peft adapters around it.

    It can only be one if transformers was imported.
    """
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(without_adapters(module), library.PreTrainedModel)


def without_adapters(module: nn.Module) -> nn.Module:
    """Return the model inside a PeftModel; any other model is returned unchanged."""
    library = sys.modules.get("peft.peft_model")
    if library is not None and isinstance(module, library.PeftModel):
        return module.get_base_model()
    return module


def remove_hooks(module: nn.Module) -> None:
    """Remove the hooks of accelerate, which move weights and inputs between devices."""
    if hasattr(module, "_hf_hook"):
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(module, recurse=True)


FUNCTIONS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "assistant_model",
    "streamer",
    "custom_generate",
)
"""Arguments of `generate` that are the caller's own code, or a model that draws."""


class PretrainedCalls:
    """Base class with generation and saving of a split model, placed before the class of its
    family.
    """

    @property
    def split_root(self) -> Any:
        """Return the `SplitRoot` that is called."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Write the model. All ranks of a group call it, and the first one writes.

        Outside `save_tensor_parallel`, with a `state_dict`, each calling rank writes that dict.
        """
        root = self.split_root
        group = root._group
        has_state_dict = kwargs.get("state_dict") is not None
        if group is None or (has_state_dict and root.preserve_shards_when_saving):
            return super().save_pretrained(save_directory, *args, **kwargs)
        if not has_state_dict:
            kwargs["state_dict"] = self.state_dict()
        result = None
        if group.rank() == 0:
            result = super().save_pretrained(save_directory, *args, **kwargs)
        # rank 0 alone writes; the others may read the folder once this returns
        collectives.barrier(group)
        return result

    def check_attentions(self, has_attentions: bool | None) -> None:
        """Raise LayoutError if attention scores are requested and shards have different heads."""
        if has_attentions is None:
            has_attentions = getattr(self.config, "output_attentions", False)
        if has_attentions and self.split_root.has_heads_apart:
            raise LayoutError(
                "output_attentions=True: each shard has the scores of its own heads alone, which "
                "are not joined; leave it out, or ask the model that was split"
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the family's `generate`. All ranks of a group draw the same numbers, from the first
        rank's state.
        """
        group = self.split_root._group
        if group is not None and self._may_draw_tokens(args, kwargs):
            use_draws_of_first(group)
        return super().generate(*args, **kwargs)

    def _may_draw_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return False if tokens come from a search in which the caller's functions take no
        part.
        """
        if len(args) > 1 or any(kwargs.get(name) is not None for name in FUNCTIONS):
            return True
        if (sampled := kwargs.get("do_sample")) is not None:
            return bool(sampled)
        configs = kwargs.get("generation_config"), self.generation_config
        return any(getattr(config, "do_sample", None) for config in configs)

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: weights that the model tied before the split are one tensor in each shard."""

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Raises LayoutError, as the tables are cut."""
        raise LayoutError(
            "resize_token_embeddings needs whole tables, which the shards do not have; resize the "
            "model first, then split it"
        )


class SplitPretrained(PretrainedCalls, SplitModel):
    """A split transformers model: its own class, with these methods taking precedence."""

    @property
    def split_root(self) -> SplitModel:
        return self

    def _begin(self, split: ModelSplit, group: Group | None, module: nn.Module) -> None:
        super()._begin(split, group, module)
        # peft finds the table of tokens by its number of rows, or by this name of DeepSpeed's
        table: Any = getattr(self.get_input_embeddings(), "weight", None)
        for name, parameter in self.named_parameters():
            if parameter is table:
                table.ds_shape = torch.Size(split.layouts[name].shape)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check_attentions(kwargs.get("output_attentions"))
        return super().__call__(*args, **kwargs)
