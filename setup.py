"""Puts what a run reads (recipes, prompts, benchmarks, batch scripts) into the wheel, for `exittrain.records.share`."""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py

SHARED = (
    "recipes", "data/prompts", "data/fixtures", "data/conversations", "eval/benchmarks", "eval/suites",
    "eval/published", "slurm",
)  # fmt: skip


class BuildWithShared(build_py):
    """An editable install reads the checkout itself."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in SHARED:
            if Path(folder).is_dir():
                destination = Path(self.build_lib, "exittrain", "_share", folder)
                copytree(folder, destination, dirs_exist_ok=True, ignore=ignore_patterns(".*", "__pycache__"))


setup(cmdclass={"build_py": BuildWithShared})
