"""Cells in pieces: what one process makes at once, the same pieces whatever the number of processes.

A piece is a fixed number of contexts or one batch of prompts. Its numbers depend on nothing outside it, and a cell is
its pieces joined in order: so no file of an evaluation shows how many ranks or jobs made it, or in how many lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from exittrain.errors import InputError
from exittrain.runtime.parts import Part, share
from exittrain.runtime.progress import progress_bar
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.results import CellStore

if TYPE_CHECKING:
    from typing_extensions import Self


class Joinable(Protocol):
    """`Storable`, and its parts make a whole."""

    def to_json(self) -> dict[str, Any]: ...

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self: ...

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self: ...


Joined = TypeVar("Joined", bound=Joinable)


class Incomplete(InputError):
    """A piece is not there: another part has not made it yet, or it was lost."""


@dataclass(frozen=True)
class Piece(Generic[Joined]):
    """One piece of a cell. name: for people; make: measures it, on the models that are loaded now."""

    kind: type[Joined]
    key: str
    name: str
    make: Callable[[], Joined]

    def get(self, store: CellStore) -> Joined:
        """From disk, else made and stored."""
        return store.get(self.kind, self.key, self.make)


@dataclass(frozen=True)
class PiecedCell(Generic[Joined]):
    """A cell as its pieces, in order. rest: what of it needs no measuring and is joined first."""

    kind: type[Joined]
    pieces: tuple[Piece[Joined], ...]
    rest: tuple[Joined, ...] = ()

    def get(self, store: CellStore) -> Joined:
        """The whole; pieces that are missing are made."""
        return self.kind.join([*self.rest, *(piece.get(store) for piece in self.pieces)])

    def read(self, store: CellStore) -> Joined:
        """The whole, from disk alone.

        Raises:
            Incomplete: a piece is missing or damaged.
        """
        found = list(self.rest)
        for piece in self.pieces:
            part = store.find(piece.kind, piece.key)
            if part is None:
                raise Incomplete(f"{piece.name} is not measured yet: run the other parts, or the same command again")
            found.append(part)
        return self.kind.join(found)


class Worker:
    """Makes this rank's share of the pieces, which go round all ranks of all parts in turn, whatever cell they are of.

    A rank looks for its own pieces alone: a network file system that has told a node of no file may go on telling it.
    """

    def __init__(self, store: CellStore, part: Part, stop: StopFlag) -> None:
        self.store, self.part, self.stop = store, part, stop
        self._before = 0

    def mine(self, pieces: Sequence[Piece[Any]]) -> list[Piece[Any]]:
        """This rank's. Every rank of every part asks for the same lists in the same order."""
        turns = range(self._before + len(pieces))
        own = [pieces[turn - self._before] for turn in share(turns, self.part) if turn >= self._before]
        self._before += len(pieces)
        return own

    def make(self, pieces: Sequence[Piece[Any]], description: str) -> None:
        """What is not on disk of `pieces`. Raises Interrupted between two of them; the whole ones stay."""
        with progress_bar(len(pieces), description, "pieces") as bar:
            for piece in pieces:
                self.stop.raise_if_set()
                piece.get(self.store)
                bar.advance(1, piece.name)
