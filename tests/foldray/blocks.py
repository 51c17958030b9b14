"""A dense block, a MoE block, and one that predicts a further token, for graphs in tests."""

from foldray.blueprint import ModelSpec
from tests.foldray.parity import MODEL

_MODEL = ModelSpec(**{**MODEL, "layers": 2, "dense_first": 1, "mtp_depth": 1})
DENSE, MOE, FURTHER = map(_MODEL.block, range(3))
