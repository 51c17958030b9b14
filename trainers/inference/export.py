"""`foldray export-hf`: a checkpoint becomes a folder that Hugging Face's transformers loads as it is.

Tensors go through memory one at a time. The folder appears when all of it is written.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track

from foldray.errors import UserError
from foldray.files import writing
from foldray.recipe import Recipe
from trainers.hugging_face.adapters import CONFIG, TENSORS, adapter_config, adapter_tensors
from trainers.hugging_face.families import family_of, named_family, tensors_of
from trainers.hugging_face.family import Family
from trainers.hugging_face.files import Form, write_file
from trainers.hugging_face.names import Tensor
from trainers.hugging_face.tokens import roles, write_tokenizer
from trainers.inference.trained import Trained
from trainers.inference.values import Values

DTYPES = ("float32", "bfloat16", "float16", "float64")
_PEFT = "peft.PeftModel"
_FILE = 4 << 30  # bytes of a file, if no tensor is larger


class Exported(NamedTuple):
    """What was written, after how many steps of the training, and how much of it."""

    folder: str
    architecture: str
    step: int
    parameters: int
    dtype: str
    files: int
    bytes: int


def export(
    run: str, folder: Path, dtype: str | None = None, as_json: bool = False, trust: bool = False, adapter: bool = False
) -> int:
    """Write the model of a run, or of one of its checkpoints, for transformers. Say what was written, and return 0.

    Args:
        dtype: type of the weights; None is that of the training.
        adapter: whether to write the adapter alone, for PEFT. Otherwise it is merged with the weights.
    """
    if os.path.lexists(folder):
        raise UserError("DIR", str(folder), "exists already; give the name of a new folder")
    trained = Trained.at(run, trust=trust)
    recipe, console = trained.recipe, Console(stderr=True)
    family = family_of(recipe.model, named_family(recipe.export.family))
    wanted = getattr(torch, dtype or recipe.precision)
    if adapter and recipe.model.adapter is None:
        raise UserError("adapter", run, "has no adapter: its training changed all weights (model.adapter)")
    with writing("DIR", str(folder)), _new_folder(folder) as written, trained.opened() as stored:
        write = _write_adapter if adapter else _write
        exported = write(Values(stored, recipe), recipe, family, wanted, written, console)
    exported = exported._replace(folder=str(folder))
    print(json.dumps(exported._asdict()) if as_json else _told(exported, run))
    return 0


def _told(exported: Exported, run: str) -> str:
    files = f"{exported.files} file{'s' if exported.files > 1 else ''}"
    what, load = "a model for transformers", f"transformers.{exported.architecture}.from_pretrained("
    if exported.architecture == _PEFT:
        what, load = "an adapter for PEFT", f"{_PEFT}.from_pretrained(model, "
    return "\n".join([
        f"{run}, after {exported.step} steps, is now {what} in {exported.folder}",
        "",
        f"  class       {exported.architecture}",
        f"  parameters  {exported.parameters:,} in {exported.dtype}, {exported.bytes / 2**20:,.1f} MiB in {files}",
        f'  load it     {load}"{exported.folder}")',
    ])  # fmt: skip


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets its name once all of it is written. If that fails, nothing is left of it."""
    folder = folder.absolute()
    parents = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield draft
        mask = os.umask(0)
        os.umask(mask)
        for path in draft.iterdir():
            path.chmod(0o666 & ~mask)  # safetensors lets only the owner read its files
        draft.chmod(0o777 & ~mask)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()
        raise


def _write_adapter(
    values: Values, recipe: Recipe, family: Family, dtype: torch.dtype, folder: Path, console: Console
) -> Exported:
    tensors: dict[str, list[Tensor]] = {}
    for part in adapter_tensors(family, recipe.model):
        tensors.setdefault(part.name, []).append(part)
    forms = [_form(values, parts[0], dtype) for parts in tensors.values()]
    write_file(folder / TENSORS, forms, (_read(values, tensors[form.name], form) for form in forms))
    (folder / CONFIG).write_text(json.dumps(adapter_config(recipe, family), indent=1) + "\n")
    size, count = sum(form.bytes for form in forms), sum(math.prod(form.shape) for form in forms)
    return Exported("", _PEFT, values.step, count, str(dtype).removeprefix("torch."), 1, size)


def _write(values: Values, recipe: Recipe, family: Family, dtype: torch.dtype, folder: Path, console: Console) -> Exported:
    tensors: dict[str, list[Tensor]] = {}
    copies = list(family.copies(recipe.model))
    for part in (*tensors_of(family, recipe.model), *copies):
        tensors.setdefault(part.name, []).append(part)
    forms = [_form(values, parts[0], dtype) for parts in tensors.values()]
    files, placed = list(_files(forms)), dict[str, str]()
    for number, content in enumerate(track(files, "writing", console=console, disable=not sys.stderr.isatty()), 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        write_file(folder / name, content, (_read(values, tensors[form.name], form) for form in content))
        placed |= {form.name: name for form in content}
    size = sum(form.bytes for form in forms)
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    tokenizer, kind = write_tokenizer(recipe.data.tokenizer, folder), str(dtype).removeprefix("torch.")
    tokens, generation = roles(recipe, tokenizer)
    config = {
        "architectures": [family.architecture], "model_type": family.model_type, **family.config(recipe.model),
        "max_position_embeddings": _positions(recipe), **tokens, "dtype": kind,
    }  # fmt: skip
    for name, document in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(document, indent=1) + "\n")
    repeated = {copy.name for copy in copies}
    count = sum(math.prod(form.shape) for form in forms if not tensors[form.name][0].keeps and form.name not in repeated)
    return Exported("", family.architecture, values.step, count, kind, len(files), size)


def _positions(recipe: Recipe) -> int:
    """Return how many positions the model is for. The sequences of a training may be shorter."""
    known, scaling = recipe.export.max_positions or 0, recipe.model.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return max(known, recipe.data.seq_len)
    assert scaling.original_positions
    # Before version 5, transformers take the ratio of both numbers for YaRN's factor.
    return known if known > scaling.original_positions else round(scaling.original_positions * scaling.factor)


def _files(forms: Sequence[Form]) -> Iterator[list[Form]]:
    """Yield the tensors of every file, in order. Only a single tensor makes a file larger than `_FILE`."""
    content, total = list[Form](), 0
    for form in forms:
        if content and total + form.bytes > _FILE:
            yield content
            content, total = [], 0
        content.append(form)
        total += form.bytes
    yield content


def _form(values: Values, tensor: Tensor, wanted: torch.dtype) -> Form:
    shape, dtype = values.described(tensor.ours)
    return Form(tensor.name, tensor.shape_for(shape), dtype if tensor.keeps else wanted)


def _read(values: Values, parts: Sequence[Tensor], form: Form) -> torch.Tensor:
    tensor = torch.empty(tuple(form.shape), dtype=form.dtype)
    for part in parts:
        narrow, dtype = values.read(part.ours).to(form.dtype), str(form.dtype).removeprefix("torch.")
        if not bool(narrow.isfinite().all()):
            rule = f"{part.ours} has a number that {dtype} cannot hold, or none at all"
            raise UserError("dtype", dtype, rule, DTYPES)
        part.put(tensor, narrow)
    return tensor
