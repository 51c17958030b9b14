"""The arguments of every command, with their help texts. The parser reports a mistake in one line."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from foldray.errors import UserError, nearest
from foldray.graph import SLICINGS
from foldray.recipe.page import key_help

SHELLS = ("bash", "zsh", "fish")
AXES = ("tp", "cp", "pp", "ep", "etp")
PEERS = ("transformers", "deepspeed", "torchtitan", "megatron")
ORDERS = ("tp-cp-dp-pp", "etp-ep-edp-pp")  # legal for all sizes


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a UserError for a mistake, with the legal values if it can list them."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._given = args or ()
        given, rest = super().parse_known_args(args, namespace)
        if hasattr(given, "overrides"):
            # argparse fills a "*" argument from one place only. It returns the words behind an option as unknown arguments.
            given.overrides = given.overrides + [text for text in rest if not text.startswith("-")]
            rest = [text for text in rest if text.startswith("-")]
        if rest:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            raise UserError("argument", rest[0], f"is not known to {self.prog}{nearest(rest[0], options)}", options)
        return given, rest

    def error(self, message: str) -> NoReturn:
        raise UserError("arguments", " ".join(self._given) or "nothing", f"{message}; see {self.prog} --help")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            kind = "a whole number" if action.type is int else "a number"
            raise UserError(action.option_strings[0], arg_string, f"must be {kind}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UserError(action.dest, value, f"is not known{nearest(str(value), map(str, action.choices))}", action.choices)


class _Help(argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps the line breaks of the list of keys and does not break values such as tp-cp-dp-pp."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def make_parser(version: str = "") -> argparse.ArgumentParser:
    """Return the parser of the whole command line. Its argument `command` is the name of the command."""
    parser = Parser(
        prog="foldray",
        description="Trains Mixture-of-Experts language models on Ray clusters and hides their communication. "
        "`foldray COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"foldray {version}", help="show the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    _add_training(commands)
    _add_measuring(commands)
    _add_tuning(commands)
    _add_planning(commands)
    _add_inference(commands)
    _add_watching(commands)
    _add_hugging_face(commands)
    _add_folds(commands)
    _add_shell(commands)
    return parser


def _add_training(commands: Any) -> None:
    command = _add(commands, "train", "Train a model as a recipe describes it.", epilog=key_help())
    _add_recipe(command, joins=True)
    begin = command.add_mutually_exclusive_group()
    meaning = "continue this run of the same storage from its last checkpoint; newest: the recipe's newest run, or a new one"
    begin.add_argument("--resume", metavar="RUN_ID", help=meaning)
    meaning = "start a new run from a checkpoint, also on other data: …/RUN_ID/step_XXXXXXXX"
    begin.add_argument("--from", dest="start", metavar="PATH", help=meaning)

    command = _add(commands, "submit", "Send a recipe to a Ray cluster as a job, and print the job's log.")
    _add_recipe(command)
    command.add_argument("--address", required=True, help="address of the cluster's dashboard, such as http://HOST:8265")
    command.add_argument("--no-wait", action="store_true", help="return once the cluster has accepted the job")
    command.add_argument("--stop", action="store_true", help="stop the job on Ctrl-C; without this, it goes on")

    meaning = "Compare the loss and every gradient of a recipe's fold, or of another project, with a single process."
    command = _add(commands, "verify", meaning)
    _add_recipe(command, joins=True, optional=True)
    command.add_argument("--shrink", action="store_true", help="make the model as small as the fold allows")
    _add_skew(command)
    meaning = "compare small recipes for all known ways in which parallel training goes wrong"
    command.add_argument("--all", action="store_true", help=meaning)
    meaning = "instead of a recipe, try another project on ranks of this machine (docs/notebook/referee.md)"
    command.add_argument("--peer", choices=PEERS, help=meaning)
    for name, meaning in (
        ("layout", "a layout of the peer, such as 'dp4 ep2'"),
        ("case", "a case of the peer, such as 'as it is'"),
    ):
        meaning += " (default all); repeat the option to try several"
        command.add_argument(f"--{name}", dest=f"{name}s", action="append", default=[], metavar="NAME", help=meaning)
    command.add_argument("--dtype", help="type of the peer's numbers (default: the widest that it permits)")


def _add_measuring(commands: Any) -> None:
    command = _add(commands, "bench", "Measure schedules side by side, on this machine or a cluster.")
    _add_recipe(command, joins=True)
    meaning = "schedule to measure, such as stream:4 or stream:4/2; repeat the option to compare several"
    command.add_argument("--schedule", dest="schedules", action="append", default=[], metavar="KIND:DEGREE[:LAG]", help=meaning)
    meaning = "length of the sequences (default: data.seq_len of the recipe); repeat the option to measure several"
    command.add_argument("--length", dest="lengths", type=int, action="append", default=[], metavar="N", help=meaning)
    meaning = "rounds; each round runs every schedule once (default %(default)s)"
    command.add_argument("--rounds", type=int, default=7, metavar="N", help=meaning)
    command.add_argument(
        "--skew", dest="skews", type=float, action="append", default=[], metavar="S",
        help="instead of schedules, measure the recipe's own one under uneven routing: expert e gets tokens as (e + 1)^-S; "
        "repeat the option to compare several",
    )  # fmt: skip
    _add_routes(command)
    meaning = "with --skew or --routes: also draw the step over the overload"
    command.add_argument("--picture", type=Path, metavar="FILE.png", help=meaning)

    command = _add(commands, "timeline", "Draw one training step, measured and simulated: what computes, what travels.")
    _add_recipe(command, joins=True)
    command.add_argument("--picture", type=Path, metavar="FILE.png", help="also write a picture")
    command.add_argument("--trace", type=Path, metavar="FILE.json", help="also write a trace for Perfetto (ui.perfetto.dev)")


def _add_tuning(commands: Any) -> None:
    meaning = "Find the fastest way to train a recipe, by measuring on its workers."
    command = _add(commands, "tune", meaning, epilog=key_help(tuning=True))
    _add_recipe(command, joins=True)

    command = _add(commands, "dashboard", "Show a recipe's tuning study in Optuna's dashboard.")
    _add_recipe(command)
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    command.add_argument("--port", type=int, default=8080, metavar="N", help="port to listen on (default %(default)s)")


def _add_planning(commands: Any) -> None:
    command = _add(commands, "plan", "Find the fastest folds and schedules for a model on a cluster, by predicted step time.")
    meaning = "YAML file with the model, sequences, batch, precision and number of workers"
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help=meaning)
    command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="changes to the recipe")
    command.add_argument("--model", help="named model, such as mixtral-8x22b (default: that of the recipe)")
    meaning = "known cluster, such as h100, or a file that `foldray calibrate` wrote (with --score, default: what rows name)"
    command.add_argument("--cluster", metavar="NAME", help=meaning)
    sizes = (("gpus", "number of GPUs"), ("seq-len", "tokens per sequence"), ("global-batch", "sequences per step"))
    for name, meaning in sizes:
        command.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    for axis in AXES:
        command.add_argument(f"--{axis}", type=int, metavar="N", help=f"only folds with this {axis} (default: all legal sizes)")
    command.add_argument("--dtype", help="type of weights and activations (default: that of the recipe, else bf16)")
    _add_skew(command)
    meaning = "plan memory for ranks whose experts get X times the mean number of rows (default %(default)s)"
    command.add_argument("--imbalance", type=float, default=1.0, metavar="X", help=meaning)
    meaning = "what ZeRO shards: the optimizer's state, or weights and gradients too (default %(default)s)"
    command.add_argument("--sharding", choices=("zero1", "zero3"), default="zero1", help=meaning)
    meaning = "plan with the optimizer on the host, as engine.offload: optimizer (default: what the recipe says, else not)"
    command.add_argument("--offload", action="store_true", help=meaning)
    meaning = "plan with what these operations keep on the host, as schedule.offload, such as attention,expert"
    command.add_argument("--offload-activations", metavar="KINDS", help=f"{meaning} (default: what the recipe says, else none)")
    meaning = "plan with experts that change places by load, as moe.place_every (default: what the recipe says, else not)"
    command.add_argument("--place-experts", action="store_true", help=meaning)
    meaning = "room for N copies of hot experts on each rank, as moe.copies (default: what the recipe says, else 0); see --skew"
    command.add_argument("--copies", type=int, metavar="N", help=meaning)
    command.add_argument("--top", type=int, default=10, metavar="K", help="number of results to show (default %(default)s)")
    meaning = "also show what the first N would take with found lists (schedule.kind: list); this may take a minute for each"
    command.add_argument("--list", type=int, default=0, metavar="N", help=meaning)
    meaning = "plan workers of their own for the experts (DisagMoE), and compare them with the best plan without"
    command.add_argument("--disaggregate", action="store_true", help=meaning)
    meaning = "with --disaggregate: the cluster of the experts' GPUs, if they are of another kind; --gpus counts both kinds"
    command.add_argument("--expert-cluster", metavar="NAME", help=meaning)
    meaning = "with --disaggregate: number of the experts' GPUs, out of --gpus (default: any)"
    command.add_argument("--expert-gpus", type=int, metavar="N", help=meaning)
    meaning = "also draw step time against memory; with --disaggregate, the roofline of both sides"
    command.add_argument("--picture", metavar="FILE.png", help=meaning)
    command.add_argument("--score", type=Path, metavar="FILE.csv", help="predict published rows instead, and print the errors")
    command.add_argument("--fit", type=Path, metavar="FILE.csv", help="fit the planner's constants to published rows instead")

    command = _add(commands, "calibrate", "Measure a recipe's workers, and write a hardware file for the planner.")
    _add_recipe(command, joins=True)
    command.add_argument("--out", type=Path, required=True, metavar="FILE.yaml", help="file to write")


_WINDOWS = """\
A file is one document: a separator, then its tokens. The tokens are predicted in windows of N that do not overlap, as in
training. Within a window, token i is predicted from the i tokens before it. The first token of a window is predicted from the
last token of the window before, and the first token of a file from the separator. Larger windows give tokens more context.

Bits per byte are the nats of all tokens, divided by ln 2 and by the bytes of the file, so they compare models with different
tokenizers. Experts drop no tokens."""


def _add_inference(commands: Any) -> None:
    command = _add(
        commands, "generate", "Continue a text with a trained model, in one process.",
        epilog="It stops at the end of a document (a separator) or of an answer (an eos token), or after N tokens. Experts drop "
        "no tokens.",
    )  # fmt: skip
    _add_run(command)
    command.add_argument("--prompt", required=True, metavar="TEXT", help='text to continue; "" begins a new document')
    meaning = "take TEXT as the message of a user, and answer in the chat template of the tokenizer"
    command.add_argument("--chat", action="store_true", help=meaning)
    command.add_argument("--system", metavar="TEXT", help="with --chat: the message of the system before it")
    command.add_argument("--tokens", type=int, default=128, metavar="N", help="most tokens to add (default %(default)s)")
    meaning = "divides the logits: lower is more probable text, and 0 takes the most probable token (default %(default)s)"
    command.add_argument("--temperature", type=float, default=1.0, metavar="T", help=meaning)
    meaning = "draw only the most probable tokens, which make up the probability P together (default %(default)s: all)"
    command.add_argument("--top-p", type=float, default=1.0, metavar="P", help=meaning)
    command.add_argument("--top-k", type=int, metavar="K", help="draw only the K most probable tokens (default: all)")
    command.add_argument("--seed", type=int, metavar="S", help="seed of the draws, for the same text again (default: random)")

    command = _add(commands, "eval", "Measure how well a trained model predicts text files, in one process.", epilog=_WINDOWS)
    _add_run(command)
    command.add_argument("files", nargs="+", metavar="FILE", help="UTF-8 text")
    command.add_argument("--seq-len", type=int, metavar="N", help="tokens of a window (default: data.seq_len of the training)")


def _add_watching(commands: Any) -> None:
    command = _add(
        commands, "status", "Show how a run is doing: its step, its last checkpoint, its failures, and what its ranks do."
    )
    _add_run(command, "folder of a run, which may still train")
    meaning = "also show after how many steps, tokens and seconds the losses stayed at or below X nats per token; may be repeated"
    command.add_argument("--loss", dest="losses", type=float, action="append", default=[], metavar="X", help=meaning)

    command = _add(commands, "health", "Show how evenly a run uses its experts: full, dead and starved ones, by MoE layer.")
    _add_run(command, "folder of a run, which may still train")
    command.add_argument("--picture", metavar="FILE.png", help="also draw the whole run on one page")


def _add_hugging_face(commands: Any) -> None:
    command = _add(commands, "export-hf", "Write a trained model as a folder that Hugging Face's transformers loads.")
    _add_run(command)
    command.add_argument("folder", type=Path, metavar="DIR", help="folder to write; it must not exist")
    meaning = "type of the weights (default: that of the training)"
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help=meaning)
    meaning = "write the adapter alone, for PEFT (default: the model with the adapter added to its weights)"
    command.add_argument("--adapter", action="store_true", help=meaning)

    command = _add(commands, "import-hf", "Write a recipe that trains a model of Hugging Face's transformers further.")
    command.add_argument("folder", metavar="DIR", help="folder of the model: config.json, weights in safetensors, tokenizer")
    command.add_argument("path", type=Path, metavar="RECIPE", help="file to write (.yaml); it must not exist")
    command.add_argument("--tokenizer", metavar="DIR", help='folder of the tokenizer, or "byte" (default: the model\'s folder)')
    meaning = "your own row for the model's family, if foldray does not know it (export.family)"
    command.add_argument("--family", metavar="module:NAME", help=meaning)
    command.add_argument("--upcycle", type=int, metavar="N", help="make N experts of each network of a model without experts")
    command.add_argument("--topk", type=int, metavar="K", help="with --upcycle: experts that each token takes (default: 2)")
    meaning = "with --upcycle: cut each of the N experts into G, and take K · G (default: 1)"
    command.add_argument("--granularity", type=int, metavar="G", help=meaning)


def _add_folds(commands: Any) -> None:
    command = _add(commands, "slice", "Show how a sequence is cut for attention and for the experts.")
    sizes = (("seq-len", "tokens per sequence"), ("degree", "number of pieces"), ("hidden", "width of the model"),
             ("heads", "number of attention heads"))  # fmt: skip
    for name, meaning in sizes:
        command.add_argument(f"--{name}", type=int, required=True, metavar="N", help=meaning)
    command.add_argument("--kind", choices=SLICINGS, default="time_uniform", help="how to cut attention (default %(default)s)")
    command.add_argument("--multiple-of", type=int, default=1, metavar="N", help="make every length a multiple of N (default 1)")

    command = _add(commands, "explain", "Draw the groups of a fold, or say why it is illegal and which folds are near.")
    meaning = "YAML file whose fold to draw, in place of the options below"
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help=meaning)
    _add_overrides(command)
    command.add_argument("--world-size", type=int, metavar="W", help="number of ranks")
    for axis, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert tensor")):
        command.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{meaning}-parallel size (default 1)")
    meaning = "give the last N ranks to the experts alone (default 0: share all)"
    command.add_argument("--expert-ranks", type=int, default=0, metavar="N", help=meaning)
    command.add_argument("--expert-pp", type=int, metavar="N", help="pipeline positions of the experts' own ranks (default: pp)")
    command.add_argument("--order", default=ORDERS[0], help="attention's axes, neighbouring ranks first (default %(default)s)")
    command.add_argument("--moe-order", default=ORDERS[1], help="experts' axes, neighbouring ranks first (default %(default)s)")
    command.add_argument("--ranks-per-node", type=int, metavar="N", help="also show which groups stay inside a node of N ranks")
    meaning = "also find the axis orders that keep the busiest groups inside nodes"
    command.add_argument("--best-order", action="store_true", help=meaning)
    command.add_argument(
        "--cluster", metavar="NODES",
        help="also find the nodes of all ranks that let the least traffic cross; NODES are their sizes (3,5 or 16x8), a known "
        "cluster, a hardware file, or the address of a Ray cluster (auto: on this machine)",
    )  # fmt: skip
    command.add_argument("--picture", metavar="FILE.png", help="also draw both grids as a picture")


def _add_shell(commands: Any) -> None:
    command = _add(commands, "recipes", "List the recipes that come with foldray, or copy them.")
    command.add_argument("--copy", type=Path, metavar="DIR", help="copy them to DIR/recipes, to change them")

    command = _add(
        commands, "completion", "Print a script that completes commands, options, recipes and their keys in a shell.",
        epilog="Such as: source <(foldray completion bash), in ~/.bashrc; or foldray completion fish | source.",
    )  # fmt: skip
    command.add_argument("shell", choices=SHELLS, help="the shell: %(choices)s")


def _add(commands: Any, name: str, meaning: str, epilog: str | None = None) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=meaning, description=meaning, epilog=epilog, formatter_class=_Help)
    command.add_argument("--json", action="store_true", help="print one JSON document on stdout, and everything else on stderr")
    return command


_TRAINED = "folder or URI of a run, for its newest checkpoint, or of a checkpoint: …/step_XXXXXXXX"


def _add_run(command: argparse.ArgumentParser, meaning: str = _TRAINED) -> None:
    command.add_argument("run", metavar="RUN", help=meaning)
    meaning = "import the modules that the run's recipe names (module:NAME), which runs their code"
    command.add_argument("--trust", action="store_true", help=meaning)


def _add_recipe(command: argparse.ArgumentParser, joins: bool = False, optional: bool = False) -> None:
    """Add the arguments for a recipe and its changes, and for the address if the command joins a Ray cluster."""
    meaning = "YAML file, or the name of one of `foldray recipes`; docs/recipe.md describes its keys"
    command.add_argument("recipe", metavar="RECIPE", nargs="?" if optional else None, help=meaning)
    _add_overrides(command)
    if joins:
        meaning = "Ray cluster to join (cluster.address, default that of RAY_ADDRESS); without any, Ray starts on this machine"
        command.add_argument("--address", dest="joined", metavar="ADDRESS", help=meaning)


def _add_skew(command: argparse.ArgumentParser) -> None:
    meaning = "uneven routing: expert e (from 0) gets tokens as (e + 1)^-S (model.router.skew)"
    command.add_argument("--skew", type=float, metavar="S", help=meaning)
    _add_routes(command)


def _add_routes(command: argparse.ArgumentParser) -> None:
    meaning = "uneven routing as a run has recorded it (routes.record): in the step and the block with the median overload"
    command.add_argument("--routes", metavar="RUN", help=meaning)


def _add_overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="changes to the recipe, such as fold.ep=4")
