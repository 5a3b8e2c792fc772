"""How work that falls into pieces is shared: among the jobs of an array, and in each of them among its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from exittrain.errors import InputError
from exittrain.runtime.ranks import rank, world_size

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """Job `index` (from 0) of the `count` jobs that do one stage together.

    Raises:
        InputError: index is not below count, or negative.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            last = f"{self.count - 1}/{self.count}"
            raise InputError(f"part {self.index}/{self.count} does not exist: they are 0/{self.count} to {last}")

    @classmethod
    def parse(cls, text: str) -> Part:
        """`3/8`: the fourth of eight.

        Raises:
            InputError: no such form, or no such part.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdigit() and count.isdigit() and int(count)):
            raise InputError(f"--part {text} is no part: write 0/8 for the first of eight")
        return cls(int(index), int(count))


WHOLE = Part(0, 1)


def share(items: Sequence[Item], part: Part = WHOLE) -> list[Item]:
    """This rank's items of this part. All ranks and parts together have every item once; some may have none."""
    return list(items[part.index :: part.count][rank() :: world_size()])
