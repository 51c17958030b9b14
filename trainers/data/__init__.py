"""Documents → tokens → packed sequences on disk; reading by global index; byte baselines."""

from trainers.data.baselines import Baselines
from trainers.data.packed import Batches, PackedData, SampleOrder, Split, sample_order
from trainers.data.prepare import Progress, prepare
from trainers.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "Baselines",
    "Batches",
    "PackedData",
    "Progress",
    "SampleOrder",
    "Split",
    "Tokenizer",
    "load_tokenizer",
    "prepare",
    "sample_order",
]
