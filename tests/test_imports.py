"""Imports run one way between the folders and between foldray's floors, and foldray imports few packages."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDERS = ("foldray", "trainers", "tuners", "recipes", "benchmarks")  # ground first
ENGINE_NEEDS = ("torch", "numpy", "scipy", "pydantic", "PyYAML")
ENGINE_IMPORTS = {"torch", "numpy", "scipy", "pydantic", "yaml"}
OPTIONAL = {"tutel": ("moe",), "argcomplete": ("cli", "completion.py"), "fla": ("kernels", "fla.py")}  # and their only places
WITHOUT_TORCH = {
    "__init__", "__main__", "urls", "amounts", "errors", "files", "tables", "activations", "windows", "kinds", "fold", "nodes",
    "blueprint", "graph", "clock", "orders", "finding", "recipe", "costs", "plan", "refold", "choosing", "cli",
}  # fmt: skip


def rows(title: str) -> list[str]:
    """Return the modules and packages of a table in docs/architecture.md, the ground floor first."""
    table = (ROOT / "docs" / "architecture.md").read_text().split(f"| {title} | one line |")[1].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)(?:\.py|/)` \|", table, re.MULTILINE)


FLOORS = rows("floor")
ROOMS = rows("room")  # the rooms of trainers/


def imports(path: PurePosixPath, source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, module, whether inside a function) of every import, `import_module("…")` and `__import__("…")`."""
    package = path.parent.parts

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[int, str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) + 1 - node.level], *filter(None, [node.module])] if node.level else [node.module]
            yield from ((node.lineno, ".".join([*base, alias.name]), inside) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = (argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant))
            yield from ((node.lineno, str(name), inside) for name in names)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def room(parts: tuple[str, ...]) -> str:
    """Return the floor of a module inside foldray; `__init__` for the names of the package itself."""
    name = parts[1].removesuffix(".py") if len(parts) > 1 else "__init__"
    return name if name in FLOORS or name == "__main__" else "__init__"


def violations(path: str, source: str) -> list[str]:
    where = PurePosixPath(path)
    folder = where.parts[0]
    found = []
    for line, module, inside in imports(where, source):
        parts = tuple(module.split("."))
        rule = None
        if parts[0] in (*FOLDERS, "tests"):
            rule = _against_direction(where.parts, parts, inside)
        elif folder == "foldray":
            rule = _not_for_the_engine(where.parts, parts[0], inside)
        elif folder == "trainers" and parts[0] == "optuna":
            rule = "search lives in tuners/"
        if rule:
            found.append(f"{path}:{line}: {module}: {rule}")
    return found


def _against_direction(source: tuple[str, ...], target: tuple[str, ...], inside: bool) -> str | None:
    if target[0] == "tests":
        lab = source[0] == "benchmarks" and target[1] == "lab"  # benchmarks measure on the lab's hosts
        return None if lab else "nothing imports tests"
    if target[0] in ("recipes", "benchmarks"):
        return f"{target[0]}/ is no package"
    if source[0] != "foldray" or target[0] != "foldray":
        if source[:2] == ("foldray", "cli") and inside:
            return None
        if source[0] == target[0] == "trainers":
            return _between_rooms(source, target)
        return "against the direction" if FOLDERS.index(target[0]) > FOLDERS.index(source[0]) else None
    here, there = room(source), room(target)
    if here == "__main__":
        return None
    if here == "__init__":
        return None if there in WITHOUT_TORCH else "`import foldray` brings no torch"
    if there == "__init__":
        return None if here == "cli" else "a floor imports from floors, not from what foldray offers to others"
    return "against the direction" if FLOORS.index(there) > FLOORS.index(here) else None


def _between_rooms(source: tuple[str, ...], target: tuple[str, ...]) -> str | None:
    here, there = (parts[1].removesuffix(".py") if len(parts) > 1 else "__init__" for parts in (source, target))
    if here == "__init__":
        return None
    if there not in ROOMS:
        return "a room imports from rooms, not from what trainers offers to others"
    return "against the direction" if ROOMS.index(there) > ROOMS.index(here) else None


def _not_for_the_engine(source: tuple[str, ...], package: str, inside: bool) -> str | None:
    here = room(source)
    if package in OPTIONAL and source[1:][: len(OPTIONAL[package])] == OPTIONAL[package]:
        return None if inside else "an optional package is imported inside the function that uses it"
    if package == "triton" and source[1:] in (("kernels", "fused_kernels.py"), ("kernels", "routing_kernels.py")):
        return None  # modules that the first launch imports
    if package == "torch" and here in WITHOUT_TORCH:
        return "this floor does without torch"
    if package in ENGINE_IMPORTS or package in sys.stdlib_module_names:
        return None
    return "foldray/ needs nothing beyond torch, numpy, scipy, pydantic and PyYAML"


def modules() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_imports_follow_the_direction():
    found = [line for path in modules() for line in violations(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, in order; an empty list if there is no circle."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(edges.get(name, ())):
                if found := visit(other, (*path, name)):
                    return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := visit(name, ()))), [])


def test_no_module_imports_itself_by_way_of_others():
    """Imports inside functions and for type checkers count, too."""
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in modules()}
    edges = {}
    for name, path in names.items():
        targets = {module for _, module, _ in imports(PurePosixPath(path), (ROOT / path).read_text())}
        edges[name] = {module if module in names else module.rpartition(".")[0] for module in targets} & set(names) - {name}
    assert circle(edges) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_every_room_of_trainers_is_in_the_architecture_page():
    entries = {PurePosixPath(path).parts[1].removesuffix(".py") for path in modules() if path.startswith("trainers/")}
    assert entries - {"__init__"} == set(ROOMS)


def test_every_floor_is_in_the_architecture_page():
    assert {"errors", "kinds", "fold", "blueprint", "recipe"} <= set(FLOORS)
    entries = {PurePosixPath(path).parts[1].removesuffix(".py") for path in modules() if path.startswith("foldray/")}
    assert entries - {"__init__", "__main__"} <= set(FLOORS)


@pytest.mark.parametrize(
    ("path", "source", "fragment"),
    [
        ("foldray/moe/layer.py", "import ray.train", "nothing beyond torch"),
        ("foldray/moe/layer.py", "def f():\n    from deepspeed import comm", "nothing beyond torch"),
        ("foldray/moe/layer.py", "import importlib\nimportlib.import_module('mlflow')", "nothing beyond torch"),
        ("foldray/moe/layer.py", "if True:\n    import transformers", "nothing beyond torch"),
        ("foldray/moe/layer.py", "import tutel", "inside the function"),
        ("foldray/cli/completion.py", "import argcomplete", "inside the function"),
        ("foldray/cli/running.py", "def f():\n    import argcomplete", "nothing beyond torch"),
        ("foldray/model/block.py", "def f():\n    import tutel", "nothing beyond torch"),
        ("foldray/kernels/experts.py", "def f():\n    import triton", "nothing beyond torch"),
        ("foldray/kernels/delta.py", "def f():\n    import fla", "nothing beyond torch"),
        ("foldray/kernels/fla.py", "import fla", "inside the function"),
        ("foldray/moe/layer.py", "import trainers.worker.loop", "against the direction"),
        ("foldray/moe/layer.py", "from foldray.model import Transformer", "against the direction"),
        ("foldray/moe/layer.py", "from foldray import model", "against the direction"),
        ("foldray/moe/layer.py", "from ..model import Transformer", "against the direction"),
        ("foldray/moe/layer.py", "from foldray import Fold", "imports from floors"),
        ("foldray/fold/fold.py", "from foldray.recipe import Recipe", "against the direction"),
        ("foldray/fold/fold.py", "def f():\n    import torch", "without torch"),
        ("foldray/recipe.py", "import torch.distributed", "without torch"),
        ("foldray/__init__.py", "from foldray.moe import MoELayer", "brings no torch"),
        ("foldray/__init__.py", "from .comm import Groups", "brings no torch"),
        ("foldray/cli/running.py", "from trainers import FoldTrainer", "against the direction"),
        ("foldray/cli/running.py", "def train():\n    import ray", "nothing beyond torch"),
        ("trainers/worker/loop.py", "import tuners", "against the direction"),
        ("trainers/worker/loop.py", "from trainers.driver import run", "against the direction"),
        ("trainers/worker/loop.py", "from trainers import FoldTrainer", "imports from rooms"),
        ("trainers/worker/loop.py", "def f():\n    import optuna", "tuners/"),
        ("tuners/study.py", "import recipes.quickstart", "no package"),
        ("recipes/run.py", "from tests.lab import hosts", "nothing imports tests"),
    ],
)
def test_a_violation_is_caught(path, source, fragment):
    found = violations(path, source)
    assert len(found) == 1
    assert fragment in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("foldray/moe/layer.py", "import math\nimport torch\nfrom foldray.comm import Groups\nfrom .router import Router"),
        ("foldray/moe/backends.py", "def f():\n    from tutel import moe"),
        ("foldray/kernels/fused_kernels.py", "import triton"),
        ("foldray/cli/running.py", "from foldray import Recipe\ndef train():\n    from trainers import FoldTrainer"),
        ("foldray/__main__.py", "from foldray.cli import main"),
        ("trainers/loop.py", "import ray\nimport deepspeed\nfrom foldray import Recipe\nfrom foldray.runtime import TorchEngine"),
        ("tuners/study.py", "import optuna\nfrom trainers import FoldTrainer"),
        ("recipes/run.py", "from tuners import FoldTuner\nfrom trainers import FoldTrainer\nimport foldray"),
    ],
)
def test_what_is_allowed_passes(path, source):
    assert violations(path, source) == []


# Distributions with other names.
DISTRIBUTIONS = {
    "yaml": "pyyaml", "sklearn": "scikit-learn", "grpc": "grpcio", "pynvml": "nvidia-ml-py", "megatron": "megatron-core",
    "fla": "fla-core",
}  # fmt: skip
LIBRARIES = ("foldray", "trainers", "tuners")
ON_NO_INDEX = {"tutel"}  # a command of its own installs it


def undeclared(path: str, source: str, declared: set[str]) -> list[str]:
    """Return the external packages that a module imports, but pyproject.toml does not name."""
    tops = {module.split(".")[0] for _, module, _ in imports(PurePosixPath(path), source)}
    tops -= {*sys.stdlib_module_names, *FOLDERS, "tests"}
    return sorted(top for top in tops if DISTRIBUTIONS.get(top, canonicalize_name(top)) not in declared)


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for key, names in project["optional-dependencies"].items() if key != "dev" for name in names]
    requirements = [Requirement(text) for text in [*project["dependencies"], *extras]]
    assert [str(each) for each in requirements if each.url] == [], "an index refuses packages that require an address"
    declared = {canonicalize_name(each.name) for each in requirements} | ON_NO_INDEX
    paths = [path for path in modules() if path.split("/")[0] in LIBRARIES]
    assert {path: found for path in paths if (found := undeclared(path, (ROOT / path).read_text(), declared))} == {}
    assert undeclared("tuners/a.py", "def f():\n    from sklearn.base import x", declared - {"scikit-learn"}) == ["sklearn"]


def test_one_command_installs_tutel():
    """The page has the command that the error of a missing package names, for the environment of `make setup`."""
    from foldray.moe.tutel import INSTALL

    command = INSTALL.split(" (")[0]
    pages = "docs/install.md", "README.md", "CONTRIBUTING.md"
    assert command.replace("pip", ".venv/bin/pip", 1) in (ROOT / pages[0]).read_text().splitlines()
    assert not any(f"[{name}]" in (ROOT / path).read_text() for name in ON_NO_INDEX for path in pages)


_MAKES = {"tensor", "zeros", "ones", "full", "empty", "arange", "randn", "rand"}
_TALKS = {"all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "send"}


def host_tensors_sent(source: str) -> list[int]:
    """Return the lines that send a new tensor without a device through a communicator. NCCL refuses tensors on the CPU."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1].removeprefix("start_") in _TALKS:
            made = [node for given in call.args for node in ast.walk(given) if isinstance(node, ast.Call)]
            found += [
                node.lineno
                for node in made
                if ast.unparse(node.func) in {f"torch.{name}" for name in _MAKES}
                and "device" not in {keyword.arg for keyword in node.keywords}
            ]
    return found


def test_what_travels_is_made_on_the_device():
    paths = [path for path in modules() if path.split("/")[0] in LIBRARIES]
    assert {path: lines for path in paths if (lines := host_tensors_sent((ROOT / path).read_text()))} == {}
    assert host_tensors_sent("control.all_gather(torch.tensor([own])).tolist()") == [1]
    assert host_tensors_sent("control.all_gather(torch.tensor([own], device=device))") == []


def closure(names: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """Return distributions and their installed requirements. (Some builds of torch contain what they require.)"""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = [(Requirement(name), False) for name in names]
    while todo:
        requirement, optional = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            assert optional, f"{name} is not installed"
            continue
        for text in found[name].requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                todo.append((needed, True))
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> Path:
    """A Python with only foldray and the packages that it needs."""
    environment = tmp_path_factory.mktemp("bare") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = next(environment.glob("lib/python*/site-packages"))
    for distribution in closure(ENGINE_NEEDS).values():
        files = distribution.files
        assert files, f"{distribution.name} does not list its files"
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists() and not top.endswith(".pth"):
                (site / top).symlink_to(distribution.locate_file(top))
    (site / "foldray").symlink_to(ROOT / "foldray")
    return environment / "bin" / "python"


def run(python: Path | str, source: str, *options: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(python), *options, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_foldray_runs_where_only_torch_and_its_like_are(bare_python):
    dotted = (path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in modules())
    triton = {"foldray.kernels.fused_kernels", "foldray.kernels.routing_kernels"}  # imported where it is
    left_out = {"foldray.__main__", *triton}
    names = [name for name in dotted if name.split(".")[0] == "foldray" and name not in left_out]
    source = f"""
        import importlib, importlib.util
        for name in {names}:
            importlib.import_module(name)
        others = ["ray", "deepspeed", "optuna", "mlflow", "transformers", "rich", "matplotlib", "trainers", "tuners"]
        print("also there:", [name for name in others if importlib.util.find_spec(name)])
        try:
            import ray
        except ModuleNotFoundError:
            print("no ray")
    """
    assert {"foldray.fold.grid", "foldray.recipe"} <= set(names)
    assert run(bare_python, source, "-I").splitlines() == ["also there: []", "no ray"]


def test_fold_and_recipe_come_without_torch():
    source = "import sys; from foldray import Fold, Recipe; print('foldray.recipe' in sys.modules, 'torch' in sys.modules)"
    assert run(sys.executable, source).split() == ["True", "False"]


def test_help_comes_without_torch():
    source = """
        import runpy, sys
        sys.argv = ["foldray", "--help"]
        try:
            runpy.run_module("foldray", run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            sys.exit(stop.code or ("torch came along" if "torch" in sys.modules else 0))
        sys.exit("--help returned")
    """
    assert "train" in run(sys.executable, source)
