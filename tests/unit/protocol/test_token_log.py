"""The hashed token list against a deliberately naive twin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocol.token_log import EMPTY_HASH, TokenLog, extend_hash, retract_hash

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def naive_hash(token_ids):
    value = EMPTY_HASH
    for token_id in token_ids:
        value = extend_hash(value, token_id)
    return value


def check(log, token_ids):
    """The log holds exactly `token_ids`, and the hash of each prefix is that of a fresh one."""
    assert len(log) == len(token_ids)
    assert log.slice(0) == tuple(token_ids)
    hashes = [log.hash_at(length) for length in range(len(token_ids) + 1)]
    assert hashes == [naive_hash(token_ids[:n]) for n in range(len(token_ids) + 1)]
    with pytest.raises(IndexError):
        log.hash_at(len(token_ids) + 1)


def test_the_hash_is_the_one_on_the_wire():
    """Both ends must agree across versions: these values are a promise."""
    assert EMPTY_HASH == 0x243F6A8885A308D3
    mixed = ((EMPTY_HASH ^ 8) * 0x9E3779B97F4A7C15) % 2**64
    assert extend_hash(EMPTY_HASH, 7) == mixed ^ (mixed >> 29)


def test_token_zero_and_order_and_length_all_count():
    prefixes = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), (1, 1)]
    assert len({naive_hash(p) for p in prefixes}) == len(prefixes)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_hash_stays_in_u64(prefix_hash, token_id):
    assert 0 <= extend_hash(prefix_hash, token_id) < 2**64


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_the_last_token_can_be_taken_back(prefix_hash, token_id):
    assert retract_hash(extend_hash(prefix_hash, token_id), token_id) == prefix_hash


def test_empty():
    check(TokenLog(), [])


@given(TOKENS)
def test_extend_append_and_constructor_agree(tokens):
    appended, extended = TokenLog(), TokenLog()
    for token_id in tokens:
        appended.append(token_id)
    extended.extend(iter(tokens))
    for log in (appended, extended, TokenLog(tokens)):
        check(log, tokens)


@given(TOKENS, TOKENS, TOKENS)
def test_a_copy_has_a_life_of_its_own(tokens, mine, theirs):
    log = TokenLog(tokens)
    twin = log.copy()
    log.extend(mine)
    twin.set_tokens(0, tuple(theirs))
    check(log, tokens + mine)
    check(twin, theirs + tokens[len(theirs) :] if theirs == tokens[: len(theirs)] else theirs)


def test_a_bad_token_changes_nothing():
    log = TokenLog((5, 6))
    with pytest.raises(TypeError):
        log.extend([7, None])
    check(log, [5, 6])


@given(TOKENS, st.integers(0, 12))
def test_truncate(tokens, length):
    log = TokenLog(tokens)
    log.truncate(length)
    check(log, tokens[:length])


@given(TOKENS, st.integers(0, 12), st.integers(0, 12))
def test_slice_and_index(tokens, start, stop):
    log = TokenLog(tokens)
    assert log.slice(start, stop) == tuple(tokens[start:stop])
    assert log.slice(start) == tuple(tokens[start:])
    assert [log[i] for i in range(len(log))] == tokens


@pytest.mark.parametrize(
    ("start", "token_ids", "common"),
    [
        (0, (), 0),
        (0, (5,), 1),
        (0, (6,), 0),
        (1, (6, 7), 2),
        (1, (6, 8), 1),
        (1, (6, 7, 8), 2),  # the third is not held
        (3, (1, 2), 0),  # nothing is held there
        (1, (7, 7), 0),
    ],
)
def test_common_len(start, token_ids, common):
    assert TokenLog((5, 6, 7)).common_len(start, token_ids) == common


@pytest.mark.parametrize(
    ("start", "token_ids", "conflict", "after"),
    [
        (1, (6, 7), None, (5, 6, 7)),  # agreed
        (0, (5,), None, (5, 6, 7)),  # agreed, and what lies behind stays
        (2, (7, 8), None, (5, 6, 7, 8)),  # extended
        (3, (8, 9), None, (5, 6, 7, 8, 9)),
        (3, (), None, (5, 6, 7)),
        (1, (9,), 1, (5, 9)),  # what lay behind is gone
        (1, (6, 9), 2, (5, 6, 9)),
        (0, (4, 6, 7), 0, (4, 6, 7)),
    ],
)
def test_set_tokens(start, token_ids, conflict, after):
    log = TokenLog((5, 6, 7))
    assert log.set_tokens(start, token_ids) == conflict
    check(log, list(after))


@given(TOKENS, st.data())
def test_set_tokens_against_the_twin(tokens, data):
    start = data.draw(st.integers(0, len(tokens)))
    new = data.draw(TOKENS)
    log = TokenLog(tokens)
    conflict = log.set_tokens(start, tuple(new))
    held = tokens[start : start + len(new)]
    different = [i for i, (a, b) in enumerate(zip(held, new, strict=False)) if a != b]
    if different:
        assert conflict == start + different[0]
        check(log, tokens[:start] + new)
    else:
        assert conflict is None
        check(log, tokens[:start] + new + tokens[start + len(new) :])
