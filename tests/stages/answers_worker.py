"""One rank that writes for a target: run by the tests of several ranks with a launcher's variables set."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from exittrain.config.schema import GenerationSection
from exittrain.errors import InputError, Interrupted
from exittrain.runtime import ranks
from exittrain.runtime.signals import StopFlag
from exittrain.stages.conversations.answers import Job, Writer, Written, with_help


class Echo(Writer):
    """Writes a job's prompt again, and notes in a file which rank did."""

    def _generate(self, jobs, what, max_new_tokens, bar):  # type: ignore[no-untyped-def]
        with open(self.folder.parent / "log.txt", "a") as log:
            log.write(f"{what} {ranks.rank()} {len(jobs)}\n")
        if what == f"stops-{ranks.rank()}":
            self.stop.set("SIGTERM")
        if what == f"fails-{ranks.rank()}":
            raise RuntimeError("no memory")
        return [Written(job.prompt[:max_new_tokens], True) for job in jobs]


def main() -> None:
    folder, failing = Path(sys.argv[1]), sys.argv[2:]
    ranks.setup(torch.device("cpu"), folder)
    jobs = [Job(f"j{i}", [i] * (i % 5 + 1)) for i in range(10)]

    def make(identity: str = "same") -> Writer:
        settings = GenerationSection(batch_size=3)
        return Echo(None, settings, folder / "parts", 0, StopFlag(), identity)

    def ask(what: str) -> list[Written]:
        if what == "raises":
            raise InputError("no such source")
        writer = make()
        answers = [writer.write(jobs, f"{what}", limit) for limit in (4, 2)]
        assert answers == [[Written(job.prompt[:limit], True) for job in jobs] for limit in (4, 2)]
        assert writer.write([], "nothing", 4) == []
        return answers[0]

    for what in failing:
        other = "other" if what == "differs" else "same"
        try:
            told = with_help(lambda what=what: ask(what), lambda other=other: make(other))
            print(what, "returned", told is not None)
        except (InputError, Interrupted, RuntimeError) as error:
            print(what, type(error).__name__, str(error).partition("\n")[0])


if __name__ == "__main__":
    main()
