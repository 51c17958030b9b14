"""A dense block and a MoE block, for graphs in tests."""

from foldray.blueprint import ModelSpec
from tests.foldray.parity import MODEL

_MODEL = ModelSpec(**{**MODEL, "layers": 2, "dense_first": 1})
DENSE, MOE = _MODEL.block(0), _MODEL.block(1)
