"""From a recipe and dotted overrides to one validated Config.

A recipe is a YAML file. Its ``defaults`` list names pieces (``model/tiny_qwen3``, ``method/gcpo``) that are looked up in
the folders above the recipe and merged in order; the recipe's own keys come after them, command-line overrides last.
An override is either dotted (``train.optimizer.lr=1e-4``) or the name of a piece (``method/grpo``), which takes the place
of the recipe's piece from the same folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from megatron_gcpo.config.checks import check
from megatron_gcpo.config.problems import explain, or_nearest
from megatron_gcpo.config.records import Config


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration a recipe and its overrides describe.

    Raises:
        ValueError: one line per problem, each naming the file or field, what is wrong and what would be right.
    """
    pieces = [item for item in overrides if "/" in item and "=" not in item]
    dotted = [item for item in overrides if item not in pieces]
    path = Path(recipe)
    try:
        recipe_values = _read(path, {_folder(piece): piece for piece in pieces})
        merged = OmegaConf.merge(recipe_values, _overrides(dotted))
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{recipe}: {_first_line(error)}") from None
    assert isinstance(values, dict), f"got {type(values)}, expected a mapping"
    return validate(values, origin=str(recipe))


def validate(values: dict[Any, Any], origin: str) -> Config:
    """The frozen record of a plain mapping; ``origin`` begins every message."""
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems = [f"{origin}: {explain(Config, e)}" for e in error.errors()]
        raise ValueError("\n".join(problems)) from None
    problems = check(config)
    if problems:
        raise ValueError("\n".join(f"{origin}: {p}" for p in problems))
    return config


def _read(path: Path, replacements: Mapping[str, str], inside: tuple[Path, ...] = ()) -> DictConfig:
    """A file merged over the pieces of its ``defaults``, with ``replacements`` (folder -> piece) in the place of theirs.

    A replacement that takes no piece's place comes after all of them. inside: the files that led to this one.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a recipe file in it")
    if not path.is_file():
        siblings = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ValueError(f"there is no recipe {path}{or_nearest(str(path), siblings)}")
    if path in inside:
        raise ValueError(f"{path} is among its own defaults: {' -> '.join(map(str, (*inside, path)))}")
    own = _read_yaml(path)
    defaults = own.pop("defaults", None)
    if not isinstance(defaults, ListConfig | None):
        raise ValueError(f"{path}: defaults must be a list of pieces, e.g. [model/tiny_qwen3, method/gcpo]")
    merged = OmegaConf.create()
    for name in map(str, defaults or ()):
        piece = _find_piece(replacements.get(_folder(name), name), path)
        merged = OmegaConf.merge(merged, _read(piece, replacements, (*inside, path)))
    if replacements and not inside:
        known = _folders(map(str, defaults or ()), path)
        for folder in (name for name in replacements if name not in known):
            merged = OmegaConf.merge(merged, _read(_find_piece(replacements[folder], path), {}, (path,)))
    result = OmegaConf.merge(merged, own)
    assert isinstance(result, DictConfig)
    return result


def _folder(piece: str) -> str:
    return piece.split("/")[0]


def _folders(pieces: Iterable[str], recipe: Path) -> set[str]:
    """Of these pieces, and of those that they are made of."""
    found = set()
    for piece in pieces:
        inner = _read_yaml(_find_piece(piece, recipe)).get("defaults") or ()
        found |= {_folder(piece), *_folders(map(str, inner), recipe)}
    return found


def _read_yaml(path: Path) -> DictConfig:
    try:
        content = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {_first_line(error)}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    if not isinstance(content, DictConfig):
        raise ValueError(f"{path} must hold a mapping of sections")
    return content


def _find_piece(name: str, recipe: Path) -> Path:
    for folder in recipe.resolve().parents:
        if (piece := folder / f"{name}.yaml").is_file():
            return piece
    root = recipe.resolve().parent.parent
    known = [str(p.relative_to(root).with_suffix("")) for p in root.glob("*/*.yaml")]
    raise ValueError(f"{recipe}: there is no piece {name}.yaml in the folders above it{or_nearest(name, known)}")


def _overrides(overrides: Sequence[str]) -> DictConfig:
    for item in overrides:
        if item.startswith("="):
            raise ValueError(f"override {item!r} has no name before '=': write section.field=value (run.steps=10)")
        if "=" not in item:
            raise ValueError(
                f"override {item!r} has no '=': write section.field=value (run.steps=10) or a piece (method/grpo)"
            )
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"cannot read the overrides {' '.join(overrides)}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
