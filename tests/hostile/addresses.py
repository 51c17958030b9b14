"""Hostile addresses: of storages, databases, trackers and clusters."""

from __future__ import annotations

from tests.hostile.row import SECRET, Row

_USER = f"me:{SECRET}"
_STORAGES = [
    ("an unknown kind", f"train recipe.yaml cluster.storage=evil://{_USER}@host/x", "holds a password"),
    ("an unknown kind without a password", "train recipe.yaml cluster.storage=evil://host/x",
     "is not a storage that can be reached"),
    ("a key in the address", f"train recipe.yaml cluster.storage=s3://KEY:{SECRET}@bucket/runs", "holds a password"),
    ("a token behind it", f"train recipe.yaml 'cluster.storage=gs://bucket/runs?access_token={SECRET}'", "holds a password"),
    ("a checkpoint with a key", f"train recipe.yaml --from s3://KEY:{SECRET}@bucket/runs/r/step_00000002",
     "from=s3://***@bucket/runs/r/step_00000002: holds a password, a key or a token"),
    ("a file that leaves", "train recipe.yaml cluster.storage=file:///proc/../proc/x", "is not a writable folder"),
    ("a file on another host", "train recipe.yaml cluster.storage=file://host/x", "is not a folder on this machine"),
    ("a device", "train recipe.yaml cluster.storage=/dev/null/x", "is not a writable folder"),
    ("a recipe as a folder", "tune recipe.yaml cluster.storage=recipe.yaml", "is not a writable folder"),
    ("nobody's home", "train recipe.yaml cluster.storage=~nobody-here/x", "names the home of an unknown user"),
    ("a zero byte", 'train recipe.yaml "cluster.storage=\\"a\\\\0b\\""', "a zero byte"),
]  # fmt: skip
_PLACES = [
    (f"a password in {key}", f"train recipe.yaml data.tokenizer=byte {key}=s3://{_USER}@bucket/x",
     f"{key}=s3://***@bucket/x: holds a password")
    for key in ("data.path", "data.cache", "data.tokenizer", "data.validation.path", "training.weights", "tune.learn")
]  # fmt: skip
_TRACKERS = [
    ("a password", f"train recipe.yaml tracking.uri=http://{_USER}@127.0.0.1:9", "http://***@127.0.0.1:9"),
    ("a password, not a port", f"train recipe.yaml tracking.uri=http://{_USER}@127.0.0.1:port", "***"),
    ("a password of a database", f"train recipe.yaml tracking.uri=postgresql://{_USER}@127.0.0.1:9/db", "***"),
    ("a token behind it", f"train recipe.yaml 'tracking.uri=http://127.0.0.1:9?token={SECRET}'", "token=***"),
    ("an unknown kind", f"train recipe.yaml tracking.uri=evil://{_USER}@host", "cannot be used for MLflow tracking"),
    ("a file outside", "train recipe.yaml tracking.uri=file:///proc/x", "cannot be used for MLflow tracking"),
    ("a path", "train recipe.yaml tracking.uri=../../../x", "cannot be used for MLflow tracking"),
    ("Databricks", f"train recipe.yaml tracking.uri=databricks://{_USER}@host", "cannot be used for MLflow tracking"),
    ("a database in a device", "train recipe.yaml tracking.uri=sqlite:////dev/null/x.db", "cannot be used for MLflow tracking"),
    ("a database that is a recipe", "train recipe.yaml tracking.uri=sqlite:///recipe.yaml", "file is not a database"),
    ("options of a driver", "train recipe.yaml tracking.uri=sqlite://user@/x?evil=1", "cannot be used for MLflow tracking"),
    ("an address with a hidden password", "train recipe.yaml tracking.uri=http://***@127.0.0.1:9", "lacks its secret"),
]  # fmt: skip
_STUDIES = [
    ("a password", f"dashboard recipe.yaml tune.storage=postgresql+psycopg2://{_USER}@127.0.0.1:9/db", "***"),
    ("a token behind it", f"dashboard recipe.yaml 'tune.storage=postgresql://127.0.0.1:9/db?password={SECRET}'", "***"),
    ("Redis, whose entries are pickles", f"dashboard recipe.yaml tune.storage=redis://{_USER}@127.0.0.1:9", "tune.storage="),
    ("an unknown driver", f"dashboard recipe.yaml tune.storage=evil+evil://{_USER}@host/db", "tune.storage="),
    ("a device", "dashboard recipe.yaml tune.storage=journal:///dev/zero", "tune.storage="),
    ("a database in a file", "dashboard recipe.yaml tune.storage=sqlite:///recipe.yaml/x.db", "cannot be opened"),
    ("a database that is none", "dashboard recipe.yaml tune.storage=sqlite:///recipe.yaml", "tune.storage="),
    ("a folder", "dashboard recipe.yaml tune.storage=sqlite:///texts", "cannot be opened"),
    ("nobody's home", "dashboard recipe.yaml tune.storage=sqlite:///~nobody-here/x", "names the home of an unknown user"),
    ("a new study beside a dead tracker", "dashboard recipe.yaml tune.storage=sqlite:///new.db tracking.uri=http://127.0.0.1:9",
     "cannot be used for MLflow tracking"),
    ("a new study to tune, beside a dead tracker", "tune recipe.yaml tracking.uri=http://127.0.0.1:9",
     "cannot be used for MLflow tracking"),
    ("a study that is not there", "dashboard recipe.yaml", "run foldray tune first"),
]  # fmt: skip
_CLUSTERS = [
    ("a password", f"submit recipe.yaml --address http://{_USER}@127.0.0.1:9", "***"),
    ("a token behind it", f"submit recipe.yaml --address 'http://127.0.0.1:9/?token={SECRET}'", "***"),
    ("a file", "submit recipe.yaml --address file:///etc/passwd", "must be the address of the cluster's dashboard"),
    ("a script", "submit recipe.yaml --address javascript:alert(1)", "must be the address of the cluster's dashboard"),
    ("half an address", "submit recipe.yaml --address http://[::1", "must be the address of the cluster's dashboard"),
    ("a line break", "submit recipe.yaml --address 'http://127.0.0.1:9/\r\nX-Evil: 1'", "address="),
    ("a module of Ray's", "submit recipe.yaml --address own_module://x", "must be the address of the cluster's dashboard"),
    ("a recipe with a password", f"submit recipe.yaml --address http://127.0.0.1:9 tracking.uri=http://{_USER}@host",
     "holds a secret, and a job's recipe is stored on its cluster"),
    ("a storage with a key", f"submit recipe.yaml --address http://127.0.0.1:9 cluster.storage=s3://K:{SECRET}@bucket/runs",
     "holds a secret, and a job's recipe is stored on its cluster"),
    ("a study with a password", f"submit recipe.yaml --address http://127.0.0.1:9 tune.storage=postgresql://{_USER}@host/db",
     "address=http://127.0.0.1:9"),
]  # fmt: skip
ROWS = [
    *(Row("storages", *row) for row in _STORAGES),
    *(Row("places of files", *row) for row in _PLACES),
    *(Row("MLflow's addresses", *row) for row in _TRACKERS),
    *(Row("storages of studies", *row) for row in _STUDIES),
    *(Row("addresses of clusters", *row) for row in _CLUSTERS),
]
