"""What every section of the YAML file is: a frozen value that refuses unknown keys."""

from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, types strict."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: object) -> object:
        """`log:` with nothing under it, because all its keys are commented out."""
        return {} if value is None else value

    def __hash__(self) -> int:
        return hash(tuple(v for v in self.__dict__.values() if not isinstance(v, dict)))


SectionT = TypeVar("SectionT", bound=Section)


def default(section: type[SectionT]) -> SectionT:
    """A section as a key: left out it holds its defaults; its docstring describes it."""
    return Field(default_factory=section, description=section.__doc__)


class NamedSection(Section):
    """A section that takes one of our names, or the user's own code by import path."""

    @model_validator(mode="before")
    @classmethod
    def _target_needs_no_name(cls, value: Any) -> Any:
        """The default name steps back for a target; a name that was written does not."""
        if not isinstance(value, dict):
            return value
        keys = cast(dict[str, Any], value)
        return keys if "name" in keys or keys.get("target") is None else {**keys, "name": None}
