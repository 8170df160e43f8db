"""Views of texts: batches are lists of strings. Templates make views of the prompts of a language model."""

__all__ = ["Case", "CharacterNoise", "Template", "WordDropout", "WordSwap", "paraphrases"]

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar

import numpy as np

from vbtta._support.random import RowStreams
from vbtta._support.tensors import Batch, RowList
from vbtta.augment.base import BuiltIn, Choice, Probability, check_streams

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class TextView(BuiltIn):
    """Base: a view that changes one text after the other in `_change`."""

    invertible: ClassVar[bool] = False
    of_texts: ClassVar[bool] = True

    def __call__(self, batch: Batch, rng: RowStreams | None = None) -> Batch:
        texts = list(batch)
        if isinstance(batch, Mapping):
            raise ValueError(f"view {self.name} takes texts; got a dict of {', '.join(map(repr, batch))}: pass key=...")
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(f"view {self.name} takes texts; row {row} is {text!r:.50}: make it a text or drop it.")
        streams = check_streams(self, texts, rng) if self.stochastic else [None] * len(texts)
        return RowList(map(self._change, texts, streams))

    def _change(self, text: str, rng: Any) -> str:
        """The text under the view; `rng` is a NumPy generator if the view is stochastic."""
        raise NotImplementedError


class WordDropout(TextView, label="word_dropout", stochastic=True):
    """Leave out each word with probability p; one word stays."""

    p: Probability

    def _change(self, text: str, rng: Any) -> str:
        words = text.split()
        kept = rng.random(len(words)) >= self.p
        if words and not kept.any():
            kept[rng.integers(len(words))] = True
        return " ".join(word for word, stays in zip(words, kept, strict=True) if stays)


class WordSwap(TextView, label="word_swap", stochastic=True):
    """Exchange each word with the next with probability p."""

    p: Probability

    def _change(self, text: str, rng: Any) -> str:
        words = text.split()
        for place in np.flatnonzero(rng.random(max(len(words) - 1, 0)) < self.p):
            words[place], words[place + 1] = words[place + 1], words[place]
        return " ".join(words)


class CharacterNoise(TextView, label="typos", stochastic=True):
    """Misspell: with probability p a letter is left out, doubled, or replaced by another, each as likely."""

    p: Probability

    def _change(self, text: str, rng: Any) -> str:
        changed, kind = rng.random(len(text)) < self.p, rng.integers(3, size=len(text))
        letters = rng.integers(len(_LETTERS), size=len(text))
        return "".join(
            ("", letter * 2, _LETTERS[letters[i]])[kind[i]] if changed[i] and letter.isalpha() else letter
            for i, letter in enumerate(text)
        )


class Case(TextView, label="case"):
    """Texts in lower or upper case, or as titles."""

    form: Annotated[str, Choice(("lower", "upper", "title"))]

    def _default_name(self) -> str:
        return self.form

    def _change(self, text: str, rng: Any) -> str:
        return str(getattr(text, self.form)())


class Template(TextView, label="template"):
    """Put the text into a template at `{}`: a prompt of a language model is a view."""

    template: str

    def _check(self) -> None:
        if not isinstance(self.template, str) or self.template.count("{}") != 1:
            raise ValueError(f"Template: template must be a text with one {{}}; got {self.template!r}.")

    def _default_name(self) -> str:
        return "identity" if self.template == "{}" else self.template

    def _change(self, text: str, rng: Any) -> str:
        return self.template.replace("{}", text)


class Paraphrase(TextView, label="paraphrase"):
    """Other words for every text, from a table of your own; see :func:`paraphrases`."""

    table: Mapping[str, str] = field(compare=False, repr=False)

    def _change(self, text: str, rng: Any) -> str:
        if text not in self.table:
            raise ValueError(f"view {self.name} has no paraphrase of {text[:60]!r}; add it to the table.")
        return self.table[text]

    def fingerprint_data(self) -> object:
        """The class: other texts have other paraphrases."""
        return type(self).__name__


def paraphrases(table: Mapping[str, Sequence[str]]) -> list[Paraphrase]:
    """Views of a table with K paraphrases of every text: `paraphrase_1` to `paraphrase_K`."""
    sizes = {len(row) for row in table.values()}
    if len(sizes) != 1 or isinstance(next(iter(table.values())), str):
        raise ValueError(f"table must have the same number of paraphrases of every text; got {sorted(sizes)}.")
    return [
        Paraphrase({text: row[k] for text, row in table.items()}, name=f"paraphrase_{k + 1}")
        for k in range(sizes.pop())
    ]
