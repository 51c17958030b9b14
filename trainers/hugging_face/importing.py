"""`foldray import-hf`: a recipe that goes on training a model of transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from foldray.blueprint import count_parameters
from foldray.errors import MissingPackage, UserError
from foldray.files import writing
from foldray.recipe import Recipe
from trainers.data.tokenizers import load_tokenizer
from trainers.hugging_face.dense import upcycled
from trainers.hugging_face.families import named_family
from trainers.hugging_face.weights import Weights

_LENGTH = 2048  # tokens of a sequence, if the model takes so many


class Upcycling(NamedTuple):
    """How many copies a dense network gets, a token takes, and how many experts a copy becomes (`dense.py`)."""

    copies: int
    topk: int
    parts: int


def import_hf(
    folder: str,
    path: Path,
    as_json: bool = False,
    upcycling: Upcycling | None = None,
    tokenizer: str | None = None,
    family: str | None = None,
) -> int:
    """Write a recipe whose training starts from the weights of a folder, and return 0.

    Args:
        family: the family of the folder's model, if it is the user's own (`export.family`).
    """
    if os.path.lexists(path):
        raise UserError("RECIPE", str(path), "exists already; give the name of a new file")
    if path.suffix not in (".yaml", ".yml"):
        raise UserError("RECIPE", str(path), "must end in .yaml")
    weights = Weights.at(folder, "DIR", named_family(family))
    weights.format()  # a folder that is quantized in another way is refused for that, and not for a tensor's name
    longest = int(weights.config().get("max_position_embeddings") or _LENGTH)
    given: dict[str, Any] = {
        "model": _model(weights, upcycling),
        "data": {"tokenizer": _tokenizer(weights.folder, tokenizer), "seq_len": min(_LENGTH, longest)},
        "training": {"weights": str(weights.folder)},
        "optimizer": {"lr": 1e-5},
        "export": weights.kept() | ({"family": family} if family else {}),
    }
    try:
        weight, origin, scope = weights.balance(Recipe.parse(given).model)
        scoped = {} if scope == "sequence" else {"balance_scope": scope}
        given["model"]["router"] = {**given["model"].get("router", {}), "balance_loss": weight, **scoped}
        recipe = Recipe.parse(given)
    except UserError as error:
        raise weights.refused(f"its config.json means a recipe that is refused ({error})") from None
    weights.check(recipe.model)
    if family is None and (named := weights.named(recipe.model)):
        given["export"]["family"] = named
        recipe = Recipe.parse(given)
    _check_tokenizer(recipe.data.tokenizer, named=tokenizer is not None)
    with writing("RECIPE", str(path)):
        path.write_text(yaml.safe_dump(given, sort_keys=False))
    count, left_out = count_parameters(recipe.model), len(weights.left_out(recipe.model))
    document = {
        "recipe": str(path), "folder": str(weights.folder), "parameters": count, "mtp_depth": recipe.model.mtp_depth,
        "left_out": left_out, "quantized": weights.format().method if weights.quantized(recipe.model) else None,
        "tokenizer": recipe.data.tokenizer, "balance_loss": weight, "balance_loss_from": origin, "balance_scope": scope,
        "dropout": weights.dropout(),
    }  # fmt: skip
    print(json.dumps(document) if as_json else _told(recipe, weights, path, count, left_out, origin))
    return 0


def _model(weights: Weights, upcycling: Upcycling | None) -> dict[str, Any]:
    read = weights.model()
    if weights.dense and not upcycling:
        rule = f"the folder has a dense model ({weights.dense}); say how many experts each of its networks becomes"
        raise UserError("upcycle", "not given", rule, ["8, for example"])
    if upcycling is None:
        return read
    if not weights.dense:
        raise UserError("upcycle", upcycling.copies, "the folder's model has experts already")
    for field, value in (("upcycle", upcycling.copies), ("topk", upcycling.topk), ("granularity", upcycling.parts)):
        if value < 1:
            raise UserError(field, value, "must be at least 1")
    if upcycling.topk > upcycling.copies:
        raise UserError("topk", upcycling.topk, f"must be at most upcycle={upcycling.copies}")
    try:
        return upcycled(read, *upcycling)
    except ValueError as error:
        raise UserError("granularity", upcycling.parts, str(error)) from None


def _tokenizer(folder: Path, named: str | None) -> str:
    """Return the value of `data.tokenizer`."""
    return named if named == "byte" else str(Path(os.path.expanduser(named or folder)).absolute())


def _check_tokenizer(name: str, named: bool) -> None:
    """Check that a tokenizer can prepare data. The weights know only the model's own tokens."""
    try:
        load_tokenizer(name)
    except MissingPackage:
        raise
    except UserError as error:
        advice = "" if named else '; name the tokenizer of these weights with --tokenizer (a folder, or "byte")'
        raise UserError("tokenizer" if named else "DIR", name, error.rule + advice) from None


def _told(recipe: Recipe, weights: Weights, path: Path, count: int, left_out: int, origin: str) -> str:
    is_own = recipe.data.tokenizer == str(weights.folder)
    rest = "take other media than text or predict further tokens" if weights.within else "predict further tokens"
    further = [f"  left out    {left_out} tensors of parts that {rest}"] if left_out else []
    if depth := recipe.model.mtp_depth:
        further.append(f"  mtp_depth   {depth}: training predicts further tokens, as the folder's model does; 0 leaves this out")
    if quantized := weights.quantized(recipe.model):
        values = f"{weights.format().title}; training starts from the values that they stand for"
        further.append(f"  quantized   {quantized:,} tensors, {values}")
    if dropout := weights.dropout():
        asked = ", ".join(f"{key}={value:g}" for key, value in dropout.items())
        further.append(f"  dropout     none: config.json asks for {asked}, and foldray trains without it")
    scope = ", per batch" if recipe.model.router.balance_scope == "batch" else ""
    return "\n".join([
        f"{path} trains the model in {weights.folder} further",
        "",
        f"  parameters  {count:,} in {len(set(weights.files.values()))} files",
        *further,
        f"  balance     model.router.balance_loss is {recipe.model.router.balance_loss:g}{scope} ({origin})",
        f"  tokenizer   {'that of the folder' if is_own else recipe.data.tokenizer}",
        f"  next        set data.source, data.path and optimizer.lr in it, then: foldray train {path}",
    ])  # fmt: skip
