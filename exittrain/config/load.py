"""YAML and dotted overrides to a checked `Recipe`; every mistake is one line that names the key and the remedy."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from exittrain.config.checks import check
from exittrain.config.schema import Recipe
from exittrain.errors import InputError, nearest
from exittrain.records.files import check_lines
from exittrain.records.share import share_names, share_path


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe (a file, a run folder, or the name of one in recipes/), apply `key.sub=value` overrides, check it.

    Raises:
        InputError: one line: missing file, YAML error with its line number, unknown key with the nearest one, a value
            of the wrong type or range, or settings that contradict each other.
    """
    file = find_recipe(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InputError(f"cannot read {file}: {reason}") from None
    check_lines(text, file)
    tree = parse_yaml(text, str(file))
    if not isinstance(tree, dict):
        raise InputError(f"{file} is no recipe: a mapping of sections is expected")
    if Path(path).is_dir():
        tree["run_dir"] = str(path)  # a run folder may have been moved or copied: where it is now counts
    for override in overrides:
        apply_override(tree, override)
    return build_recipe(tree, str(file))


def build_recipe(tree: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """Validate a plain mapping; `origin` is named in errors."""
    try:
        recipe = Recipe.model_validate(dict(tree))
    except ValidationError as error:
        raise InputError(f"{origin}: {describe(error)}") from None
    check(recipe, origin)
    return recipe


def find_recipe(path: str | Path) -> Path:
    """The YAML file meant by a path, a run folder, or a bare name of recipes/ (`quickstart`)."""
    given = Path(path)
    if given.is_dir():
        given = given / "recipe.yaml"
        if not given.is_file():
            raise InputError(f"{path} is a folder without recipe.yaml: give a recipe or a run folder")
    if given.is_file():
        return given
    if given.name == str(path):
        name = given.name.removesuffix(".yaml")
        known = [entry.removesuffix(".yaml") for entry in share_names("recipes") if entry.endswith(".yaml")]
        if name in known:
            return share_path(f"recipes/{name}.yaml")
        raise InputError(f"no recipe {str(path)!r}{nearest(name, known)} (known: {', '.join(known)})")
    raise InputError(f"recipe {path} does not exist")


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value` in place; the value is YAML (`1e-4`, `[1, 2]`, `null`). Lists take an index (`tasks.0=a`)."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise InputError(f"override {override!r} is not of the form key.subkey=value")
    node: Any = tree
    keys = path.split(".")
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise InputError(f"override {override!r}: {'.'.join(keys[:depth])} is a list of {len(node)} entries")
            slot: Any = int(key)
        elif isinstance(node, dict):
            slot = key
        else:
            raise InputError(f"override {override!r}: {'.'.join(keys[:depth])} holds a value, not a section")
        if last:
            node[slot] = parse_yaml(text, f"override {override!r}")
        else:
            if isinstance(node, dict) and node.get(key) is None:
                node[key] = {}
            node = node[slot]


def describe(error: ValidationError, root: type[BaseModel] = Recipe) -> str:
    """The first error of validating a `root` as one line, unknown keys first: a typo leaves its key missing too."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    where = [part for part in problem["loc"] if not _is_branch(part)]
    dotted = ".".join(map(str, where))
    if problem["type"] == "extra_forbidden":
        return f"unknown key {dotted!r}{nearest(str(where[-1]), known_keys(where[:-1], root))}"
    if problem["type"] == "missing":
        return f"{dotted!r} is missing"
    given = f"{problem['input']!r}" if not isinstance(problem["input"], (dict, list)) else "what it holds"
    return f"{dotted!r} cannot be {given}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def known_keys(where: Sequence[str | int], root: type[BaseModel] = Recipe) -> list[str]:
    """The keys the section at a dotted place of a `root` accepts."""
    annotation: Any = root
    for part in where:
        section = _section_of(annotation)
        if section is not None and part in section.model_fields:
            annotation = section.model_fields[str(part)].annotation
        else:  # a free name, such as an arm's: the mapping's value type
            annotation = _mapping_value(annotation)
    section = _section_of(annotation)
    return list(section.model_fields) if section is not None else []


def _arguments(annotation: Any) -> tuple[Any, ...]:
    """The alternatives an annotation allows, `Annotated` unpacked."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _arguments(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(part for argument in get_args(annotation) for part in _arguments(argument))
    return (annotation,)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for part in _arguments(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _mapping_value(annotation: Any) -> Any:
    for part in _arguments(annotation):
        if get_origin(part) is dict:
            return get_args(part)[1]
    return None


def _is_branch(part: str | int) -> bool:
    """pydantic puts the alternative of a union it tried (`list[int]`, `constrained-int`) into the place."""
    return isinstance(part, str) and (part.endswith("]") or part in _BRANCHES)


_BRANCHES = ("int", "str", "float", "bool", "constrained-int", "constrained-float")


def parse_yaml(text: str, origin: str) -> Any:
    """YAML 1.2 values; `origin` is named in errors.

    Raises:
        InputError: no YAML, or a key given twice in one mapping; the line is named.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{origin}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{origin}: {' '.join(str(error).split())}") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers (`1e-4` is one, `2:30:00` is a time) and no silent overwriting of a repeated key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
_SEXAGESIMAL = re.compile(r"^[-+]?[0-9]+(?::[0-5]?[0-9])+(?:\.[0-9]*)?$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789."))
for _first in "-+0123456789":  # asked before the resolver that reads minutes and seconds as one whole number
    _Loader.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", _SEXAGESIMAL))
