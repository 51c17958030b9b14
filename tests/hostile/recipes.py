"""Hostile recipes, values of recipes, hardware files and tables."""

from __future__ import annotations

from tests.hostile.row import LARGE, TOUCH, Make, Row, both, deep, fifo, folder, hole, linked, listening, text

HARDWARE = """
name: {name}
gpus_per_node: {gpus}
peak_tflops: {{bf16: {peak}}}
memory_gib: 80
memory_gb_s: 3000
intra: {{gb_s: {link}}}
inter: {{gb_s: 50}}
"""
LAUGHS = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
MERGES = "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12))])
PLAN = "plan --model tiny --gpus 2 --seq-len 64 --global-batch 2 --cluster"
SCORE = "plan --cluster eos-h100 --score rows.csv"
COLUMNS = "row_id,model,method,gpus,seq_len,gbs,cp,tp,ep,pp,etp_effective,mfu_pct"


def recipe(content: str | bytes) -> Make:
    return text("x.yaml", content)


def machine(**values: object) -> Make:
    return text("x.yaml", HARDWARE.format(**{"name": "x", "gpus": 8, "peak": 900, "link": 450} | values))


def _numbers(count: int) -> bytes:
    return b"".join(b"k%d: 1\n" % number for number in range(count))


_LAUGHING = ", ".join(f"&a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 9))
_YAML = [
    ("laughs", "train x.yaml", "more than 10000 values, with all aliases followed", recipe(LAUGHS)),
    ("laughs of merges", "submit x.yaml --address http://127.0.0.1:9", "with all aliases followed", recipe(MERGES)),
    ("an anchor inside itself", "verify x.yaml", "with all aliases followed", recipe("model: &a [*a]\n")),
    ("depth", "bench x.yaml", "nested deeper than 40 levels", recipe(deep(100_000))),
    ("many keys", "timeline x.yaml", "more than 10000 values", recipe(_numbers(20_000))),
    ("a number of many digits", "tune x.yaml", "more than 8192 characters", recipe(b"name: " + b"1:" * 50_000 + b"1\n")),
    ("the same key twice", "train x.yaml", "the key 'name' appears twice", recipe("name: a\nname: b\n")),
    ("a tag that calls", "train x.yaml", "could not determine a constructor",
     recipe(f'name: !!python/object/apply:os.system ["{TOUCH}"]\n')),
    ("a tag that imports", "plan x.yaml --cluster eos-h100", "could not determine a constructor",
     recipe("name: !!python/module:canary_module\n")),
    ("a tag of its own", "dashboard x.yaml", "could not determine a constructor", recipe("name: !include /etc/passwd\n")),
    ("a zero byte", "train x.yaml", "is not YAML", recipe(b"name: a\0b\n")),
    ("a zero byte, escaped", "train x.yaml", "a zero byte in line 1", recipe(r'name: "a\0b"')),
    ("a sequence for the terminal", "verify x.yaml", "the control character '\\x1b'", recipe(r'name: "\e[2J\e[31mred"')),
    ("a key for the terminal", "train x.yaml", "the control character '\\x1b'", recipe(r'"\e[2J": 1')),
    ("text from right to left", "train x.yaml", "name=a\\u202eb", recipe('name: "a\u202eb"\nmodel: {preset: tiny}\n')),
    ("UTF-16", "train x.yaml", "is not UTF-8 text", recipe("name: a\n".encode("utf-16"))),
    ("Latin-1", "calibrate x.yaml --out y.yaml", "is not UTF-8 text", recipe("name: café\n".encode("latin-1"))),
    ("a list", "train x.yaml", "must be a mapping of sections", recipe("- 1\n- 2\n")),
    ("nothing", "train x.yaml", "must be a mapping of sections", recipe("")),
    ("a merge of nothing", "train x.yaml", "is not YAML", recipe("<<: 1\nmodel: {preset: tiny}\n")),
    ("an override that laughs",
     f"train recipe.yaml 'name=[&a0 [x], {_LAUGHING}]'", "with all aliases followed", lambda place: None),
]  # fmt: skip
_FILES = [
    ("a pipe", "train x.yaml", "it is not a regular file", fifo("x.yaml")),
    ("a socket", "train x.yaml", "cannot be read", listening("x.yaml")),
    ("a device", "verify x.yaml", "it is not a regular file", linked("x.yaml", "/dev/zero")),
    ("a folder", "bench x.yaml", "Is a directory", folder("x.yaml")),
    ("a link to itself", "tune x.yaml", "Too many levels of symbolic links", linked("x.yaml", "x.yaml")),
    ("6 GiB", "submit x.yaml --address http://127.0.0.1:9", "it is larger than 256 KiB", hole("x.yaml")),
    ("a name that is too long", f"train {'x' * 5000}.yaml", "File name too long", lambda place: None),
]
_VALUES = [
    ("a name that leaves the storage", "train recipe.yaml name=../../x", "name=../../x: may hold letters"),
    ("an absolute name", "train recipe.yaml name=/etc/x", "name=/etc/x: may hold letters"),
    ("a name with a line break", 'train recipe.yaml "name=\\"a\\\\nb\\""', "may hold letters"),
    ("a study that leaves the storage", "tune recipe.yaml tune.study=../../x", "tune.study=../../x: may hold letters"),
    ("a run that leaves the storage", "train recipe.yaml --resume ../run", "resume=../run: is not a run in"),
    ("a run at an absolute path", "train recipe.yaml --resume /etc", "resume=/etc: is not a run in"),
    ("a run of two dots", "train recipe.yaml --resume ..", "resume=..: is not a run in"),
    ("the cache in nobody's home", "train recipe.yaml data.cache=~nobody-here/x", "names the home of an unknown user"),
    ("a module that does not exist", "train recipe.yaml schedule.kind=no.such.module:X", "cannot be imported"),
    ("a path as a module", "train recipe.yaml schedule.kind=../../x:X", "is not a legal value"),
    ("400 digits", f"train recipe.yaml model.layers={10**400}", "must be less than or equal to 4096"),
    ("infinity", "train recipe.yaml optimizer.lr=.inf", "optimizer.lr=inf"),
    ("no number", "train recipe.yaml optimizer.clip=.nan", "optimizer.clip=nan"),
    ("a device as text", "train recipe.yaml data.path=/dev/zero", "matches no file"),
    ("an unknown preset that is a path", f"{PLAN} eos-h100 --model ../../etc/passwd", "is not a known model"),
    ("a world of 10^30 ranks", f"explain --world-size {10**30}", "at most 131072 ranks are shown"),
    ("an order for the terminal", "explain --world-size 8 --order '\x1b[2Jtp'", "\\x1b[2Jtp"),
    ("a sequence of 10^30 tokens", f"slice --seq-len {10**30} --degree 2 --hidden 8 --heads 2", "at most 16777216"),
    ("a number in other digits", "slice --seq-len 64 --degree 2 --hidden 8 --heads x٣", "must be a whole number"),
    ("an option for the terminal", "train recipe.yaml '--\x1b[2J'", "is not known to foldray train"),
    ("a picture elsewhere", "explain --world-size 8 --picture /proc/x.png", "cannot be written"),
    ("a hardware file in a folder that is missing", "calibrate recipe.yaml --out no/such/x.yaml", "in a folder that exists"),
]  # fmt: skip
_HARDWARE = [
    ("laughs", f"{PLAN} x.yaml", "with all aliases followed", recipe(LAUGHS)),
    ("a tag that calls", f"{PLAN} x.yaml", "is not YAML", recipe(f'!!python/object/apply:os.system ["{TOUCH}"]')),
    ("infinite peak", f"{PLAN} x.yaml", "peak_tflops", machine(peak=".inf")),
    ("peak of 0", f"{PLAN} x.yaml", "peak_tflops", machine(peak="0")),
    ("negative peak", f"{PLAN} x.yaml", "peak_tflops", machine(peak="-900")),
    ("speed that is no number", f"{PLAN} x.yaml", "intra.gb_s", machine(link=".nan")),
    ("10^30 GPUs in a node", f"{PLAN} x.yaml", "gpus_per_node", machine(gpus=10**30)),
    ("10^400 GPUs in a node", f"{PLAN} x.yaml", "gpus_per_node", machine(gpus=10**400)),
    ("a list as a name", f"{PLAN} x.yaml", "name", machine(name="[1, 2]")),
    ("a number as a file", f"{PLAN} x.yaml", "x.yaml", recipe("7")),
    ("a constant that does not exist", f"{PLAN} x.yaml", "is no constant",
     both(machine(), lambda place: (place / "x.yaml").open("a").write("constants: {evil: 1}\n"))),
    ("a constant that is no number", f"{PLAN} x.yaml", "constants.gemm",
     both(machine(), lambda place: (place / "x.yaml").open("a").write("constants: {gemm: .nan}\n"))),
    ("a device", f"{PLAN} x.yaml", "it is not a regular file", linked("x.yaml", "/dev/zero")),
    ("a path without an ending", f"{PLAN} ../../../etc/passwd", "is no known cluster nor a YAML file", lambda place: None),
    ("half a table", SCORE, "has no column", text("rows.csv", "row_id,model,method\n1,tiny,MCore\n")),
    ("a cut row", SCORE, "1", text("rows.csv", f"{COLUMNS}\n1,tiny,MCore,8,64\n")),
    ("10^30 GPUs in a row", SCORE, "gpus", text("rows.csv", f"{COLUMNS}\n1,tiny,MCore,{10**30},64,8,1,1,1,1,1,40\n")),
    ("4000 digits in a row", SCORE, "gpus", text("rows.csv", f"{COLUMNS}\n1,tiny,MCore,{'9' * 5000},64,8,1,1,1,1,1,40\n")),
    ("10^18 tokens in a row", SCORE, "seq_len", text("rows.csv", f"{COLUMNS}\n1,tiny,MCore,8,{10**18},8,1,1,1,1,1,40\n")),
    ("a field without end", SCORE, "rows.csv", text("rows.csv", f'{COLUMNS}\n"{"x" * 200_000}')),
    ("a device as rows", SCORE, "it is not a regular file", linked("rows.csv", "/dev/zero")),
    ("zero bytes", SCORE, "score", text("rows.csv", b"\0" * 1000)),
    ("an MFU that is no number", SCORE, "mfu_pct",
     text("rows.csv", f"{COLUMNS}\n1,mixtral-8x22b,MCore,128,4096,256,1,2,4,8,2,nan\n")),
    ("6 GiB", "plan --cluster eos-h100 --fit rows.csv", "larger than 256 KiB", hole("rows.csv", LARGE)),
]  # fmt: skip
ROWS = [
    *(Row("YAML", *row) for row in _YAML),
    *(Row("files that are none", *row) for row in _FILES),
    *(Row("values and names", *row) for row in _VALUES),
    *(Row("hardware files and tables", *row) for row in _HARDWARE),
]
