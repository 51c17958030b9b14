"""The commands that train, measure and serve. Each imports the upper floor that it needs inside its function."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from foldray.cli import completion
from foldray.cli.output import recipe_of, say, say_either, say_json, say_nothing_more, shares_of
from foldray.errors import MissingPackage, UserError
from foldray.files import write_picture
from foldray.recipe import shipped


def train(given: argparse.Namespace) -> int:
    recipe = recipe_of(given)
    from trainers.driver.entry import train as run

    search: Any = None
    if recipe.schedule.opened:  # the recipe leaves values open
        from tuners import OnlineSearch

        search = OnlineSearch
    return run(recipe, resume=given.resume, start=given.start, as_json=given.json, search=search)


def submit(given: argparse.Namespace) -> int:
    recipe = recipe_of(given)
    from trainers.cluster.jobs import submit as run

    return run(recipe, given.address, as_json=given.json, wait=not given.no_wait, stops=given.stop)


def verify(given: argparse.Namespace) -> int:
    if given.peer:
        return _referee(given)
    for option in ("layouts", "cases", "dtype"):
        if getattr(given, option):
            raise UserError(option.removesuffix("s"), getattr(given, option), "needs --peer")
    if given.recipe is None:
        raise UserError("recipe", "nothing", "must be the recipe to verify; or --peer names a project to try")
    recipe = recipe_of(given)
    from trainers.measure.verify import verify as run
    from trainers.measure.verify import verify_all

    return verify_all(recipe, as_json=given.json) if given.all else run(recipe, shrink=given.shrink, as_json=given.json)


def _referee(given: argparse.Namespace) -> int:
    from trainers.referee.entry import referee

    refused = {"recipe": given.recipe, "shrink": given.shrink, "all": given.all, "skew": given.skew, "routes": given.routes}
    for option, value in {**refused, "address": given.joined}.items():
        if value:
            raise UserError(option, value, "does not go with --peer, which has models of its own; leave it out")
    return referee(given.peer, given.layouts, given.cases, given.dtype, as_json=given.json)


def bench(given: argparse.Namespace) -> int:
    shares, given.routes = shares_of(given), None
    recipe, uneven = recipe_of(given), "routes" if shares else "skew"
    if given.picture and not (given.skews or shares):
        raise UserError("picture", given.picture, "needs --skew or --routes")
    if not (given.skews or shares):
        from trainers.measure.bench import bench as run

        return run(recipe, given.schedules, given.rounds, given.lengths, as_json=given.json)
    if given.lengths:
        raise UserError("length", given.lengths[0], f"is that of the recipe with --{uneven}; leave it out")
    if given.schedules:
        raise UserError("schedule", given.schedules[0], f"is that of the recipe with --{uneven}; leave it out")
    from trainers.measure.uneven import bench_uneven

    return bench_uneven(recipe, given.skews, shares, given.rounds, given.picture, as_json=given.json)


def timeline(given: argparse.Namespace) -> int:
    recipe = recipe_of(given)
    from trainers.measure.bench import timeline as run

    return run(recipe, given.picture, given.trace, as_json=given.json)


def tune(given: argparse.Namespace) -> int:
    recipe = recipe_of(given)
    return _tuners(given).tune(recipe, as_json=given.json)


def dashboard(given: argparse.Namespace) -> int:
    recipe = recipe_of(given)
    return _tuners(given).dashboard(recipe, given.host, given.port, as_json=given.json)


def _tuners(given: argparse.Namespace) -> Any:
    try:
        from tuners import entry
    except ModuleNotFoundError as error:
        name = error.name or "optuna"
        raise MissingPackage("command", given.command, name, f"pip install {name.replace('_', '-')}") from None
    return entry


def calibrate(given: argparse.Namespace) -> int:
    recipe = recipe_of(given)
    from trainers.measure.calibrate import calibrate as run

    return run(recipe, given.out, as_json=given.json)


def generate(given: argparse.Namespace) -> int:
    from trainers.inference.entry import generate as run

    sampling = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k", "seed")}
    try:
        return run(given.run, given.prompt, given.tokens, sampling, given.json, given.chat, given.system, given.trust)
    except BrokenPipeError:
        say_nothing_more()
        return 0


def eval_(given: argparse.Namespace) -> int:
    from trainers.inference.entry import evaluate

    return evaluate(given.run, given.files, given.seq_len, as_json=given.json, trust=given.trust)


def status(given: argparse.Namespace) -> int:
    from trainers.driver.status import RunStatus

    run = RunStatus.at(given.run, given.trust, given.losses)
    return say_either(given, run.document, run.text)


def health(given: argparse.Namespace) -> int:
    from trainers.driver.status import RunHealth

    run = RunHealth.at(given.run, given.trust)
    if given.picture:
        write_picture(given.picture, run.draw)
    return say_either(given, run.document, run.text)


def export_hf(given: argparse.Namespace) -> int:
    from trainers.inference.export import export

    return export(given.run, given.folder, given.dtype, as_json=given.json, trust=given.trust, adapter=given.adapter)


def import_hf(given: argparse.Namespace) -> int:
    from trainers.hugging_face.importing import Upcycling
    from trainers.hugging_face.importing import import_hf as run

    for field in ("topk", "granularity"):
        if getattr(given, field) is not None and given.upcycle is None:
            raise UserError(field, getattr(given, field), "needs --upcycle")
    topk, parts = (default if value is None else value for value, default in ((given.topk, 2), (given.granularity, 1)))
    upcycling = None if given.upcycle is None else Upcycling(given.upcycle, topk, parts)
    return run(given.folder, given.path, as_json=given.json, upcycling=upcycling, tokenizer=given.tokenizer, family=given.family)


def recipes(given: argparse.Namespace) -> int:
    copied = [] if given.copy is None else shipped.copy(given.copy)
    known = shipped.shipped()
    if given.json:
        rows = [{"name": name, "path": str(recipe.path), "about": recipe.about} for name, recipe in known.items()]
        say_json({"recipes": rows, "copied": [str(path) for path in copied]})
    elif given.copy is not None:
        say("\n".join(map(str, copied)))
    else:
        for name, recipe in known.items():
            say(textwrap.fill(recipe.about, 120, initial_indent=f"{name:<20}", subsequent_indent=" " * 20))
        say("\nfoldray train NAME trains one of them. foldray recipes --copy . copies them to ./recipes, to change them.")
    return 0


def complete(given: argparse.Namespace) -> int:
    script = completion.script(given.shell)
    return say_either(given, lambda: {"shell": given.shell, "script": script}, lambda: script)
