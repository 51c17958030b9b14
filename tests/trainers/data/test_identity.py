"""Hashes of what data hold, which do not depend on how the data are cut."""

from __future__ import annotations

import hashlib
import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from trainers.data.identity import LINK, Chain

ITEMS = some.lists(some.binary(max_size=3), max_size=9)


def chain(items: list[bytes]) -> Chain:
    found = Chain()
    for item in items:
        found.add(item)
    return found


@given(ITEMS, ITEMS, ITEMS)
def test_a_chain_is_that_of_its_parts(one: list[bytes], two: list[bytes], three: list[bytes]):
    parts = [Chain.parse(str(chain(each))) for each in (one, two, three)]
    whole = Chain()
    for part in parts:
        whole.extend(part)
    assert str(whole) == str(chain(one + two + three))
    assert re.match(LINK, str(whole))


@given(ITEMS, ITEMS)
def test_other_items_have_another_chain(one: list[bytes], two: list[bytes]):
    assert (str(chain(one)) == str(chain(two))) == (one == two)


def test_a_chain_by_hand():
    base, prime = int(hashlib.sha256(b"foldray").hexdigest(), 16), 2**255 - 19
    a, b, c = (int(hashlib.sha256(each).hexdigest(), 16) for each in (b"a", b"b", b"c"))
    assert str(chain([b"a", b"b", b"c"])) == f"3-{(a * base**2 + b * base + c) % prime:064x}"


def test_documents_are_items_with_their_masks():
    tokens, trained = np.arange(6, dtype=np.uint16), np.asarray([0, 1, 1, 0, 0, 1], np.uint8)
    found = Chain()
    found.add_documents(tokens, np.asarray([0, 4]), None)
    assert str(found) == str(chain([tokens[:4].tobytes(), tokens[4:].tobytes()]))
    for starts, masks, count in (([0, 4], trained, 2), ([2, 4], None, 3), ([], None, 1)):
        other = Chain()
        other.add_documents(tokens, np.asarray(starts, np.int64), masks)
        assert other.count == count
        assert other.value != found.value
