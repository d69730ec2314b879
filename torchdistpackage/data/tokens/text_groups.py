"""Rows of texts for contrastive training: an anchor, its positive, and hard negatives. No torch."""

from typing import Any, cast

from torchdistpackage.data.tokens.documents import Document, TextGroup, is_unicode
from torchdistpackage.errors import DataError

ANCHOR, POSITIVE, NEGATIVES = "anchor", "positive", "negatives"


class TextGroupReader:
    """Reads lines of anchor, positive and negatives. num_negatives: of each line."""

    def __init__(self, num_negatives: int):
        self._number = num_negatives

    def __call__(self, value: dict[str, Any], where: str) -> TextGroup:
        """Return the texts of one line, the anchor first. where: names the line in errors.

        Raises:
            DataError: a text is missing or empty, or there are more or fewer negatives than
                data.num_negatives; it names all that is wrong with the line.
        """
        problems = [f"no key {key!r}" for key in (ANCHOR, POSITIVE) if key not in value]
        if problems:
            problems[-1] += f"; there are {', '.join(value) or 'none'}"
        negatives_of_row: object = value.get(NEGATIVES)
        texts: dict[str, Any] = {key: value[key] for key in (ANCHOR, POSITIVE) if key in value}
        if not isinstance(negatives_of_row, list | None):
            problems.append(
                f"{NEGATIVES} is a {type(negatives_of_row).__name__}; it has to be a list"
            )
        elif len(negatives := cast(list[object], negatives_of_row or [])) != self._number:
            problems.append(
                f"{len(negatives)} {NEGATIVES}, but data.num_negatives is {self._number}; every "
                f"line needs the same number, so add or remove some, or set num_negatives"
            )
        else:
            texts |= {f"{NEGATIVES}[{i}]": x for i, x in enumerate(negatives)}
        for key, text in texts.items():
            if not isinstance(text, str):
                problems.append(f"{key} is a {type(text).__name__}; it has to be a text")
            elif not text:
                problems.append(f"{key} is empty")
        if problems:
            raise DataError(f"{where}: {'; '.join(problems)}")
        return TextGroup(Document(is_unicode(x, f"{where}: {k}")) for k, x in texts.items())
