"""A translated engine at its limits: no room, no blocks, failures, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import ModelConfig, TargetConfig
from paceline.engine.base import OutOfBlocks, Propose, StepItem, Verify
from paceline.engine.loader import load_engine
from paceline.engine.translated import TranslatedEngine
from paceline.errors import ConfigError, LocalProtocolError
from paceline.sampling.params import VerificationMode
from tests.unit.engine.subjects import COUPLED, GREEDY
from tests.unit.engine.translated_twin import Twin, held, item, load, reference_token
from tests.unit.engine.two_tokenizers import read_ids, save_pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def twin(folders: dict[str, Path]) -> Twin:
    return Twin(folders)


@pytest.fixture
def engine(folders: dict[str, Path]) -> TranslatedEngine:
    return load(folders)


def test_a_text_that_outgrows_the_draft(folders: dict[str, Path], twin: Twin) -> None:
    """The target's tokens fit, their translation does not: no token and no error; and a text that
    has been rewound goes on."""
    engine = load(folders, max_model_len=40)
    foreign = max(
        range(256, twin.target.size),
        key=lambda i: len(twin.translation.translate([i], num_apart=1).token_ids),
    )
    size = len(twin.translation.translate([foreign], num_apart=1).token_ids)
    text = list(twin.text(12))
    engine.add(1)
    length = len(twin.naive(text))
    engine.step([item(0, text)])
    while length + size <= 40:
        result = engine.step([item(len(text), [foreign])])[0]
        assert result.token_ids
        text, length = [*text, foreign], length + size
    assert len(text) + 3 < 40
    for _ in range(3):
        result = engine.step([item(len(text), [foreign])])[0]
        text.append(foreign)
        assert (result.token_ids, result.cached_len) == ((), len(text))
        assert engine.cached_len(1) == len(text)
        assert len(held(engine)) <= 40
    engine.add(2)
    fork = StepItem(2, len(text) - 1, (foreign,), 1, GREEDY, fork_of=1)
    others = [fork, item(len(text), [foreign])]
    assert [result.token_ids for result in engine.step(others)] == [(), ()]
    result = engine.step([item(10, [7])])[0]
    assert twin.draft.decode(held(engine)) == twin.target.decode([*text[:10], 7])
    row = twin.row(held(engine))
    assert result.token_ids[0] == reference_token(row, GREEDY, 0, text, len(text))
    engine.check_integrity()
    for sequence_id in (1, 2):
        engine.free(sequence_id)
    assert engine.stats().num_free_blocks == engine.info.num_blocks


def test_out_of_blocks_changes_nothing(folders: dict[str, Path], twin: Twin) -> None:
    engine = load(folders, num_kv_blocks=14, max_model_len=200)
    text = twin.text(20)
    engine.add(1)
    engine.step([item(0, text)])
    before, ids = engine.stats(), [*held(engine)]
    assert not engine.can_fit([(1, 100)])
    assert engine.can_fit([(1, 21)])
    engine.add(2)
    with pytest.raises(OutOfBlocks):
        engine.step([item(12, twin.text(60)), StepItem(2, 20, (5,), 1, GREEDY, fork_of=1)])
    assert (held(engine), engine.cached_len(1), engine.cached_len(2)) == (ids, 20, 0)
    assert engine.stats().num_free_blocks == before.num_free_blocks
    result = engine.step([item(20, [300])])[0]
    assert result.token_ids[0] == reference_token(twin.row(held(engine)), GREEDY, 0, text, 20)


def test_a_failed_pass_is_tried_again(
    twin: Twin, engine: TranslatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the model or, when its cache has the rows already, in the sampler."""
    text = list(twin.text(16))
    for where, name in ((engine._engine._runner, "forward"), (engine._sampler, "rank")):
        engine.add(1)
        engine.add(2)
        engine.step([item(0, text)])
        with monkeypatch.context() as patch:
            patch.setattr(where, name, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step([item(9, [400]), StepItem(2, 12, (7,), 1, GREEDY, fork_of=1)])
        assert engine.cached_len(2) == 0
        results = engine.step([item(9, [400])])
        engine.step([StepItem(2, 9, (7,), 1, GREEDY, fork_of=1)])
        assert twin.draft.decode(held(engine)) == twin.target.decode([*text[:9], 400])
        assert twin.draft.decode(held(engine, 2)) == twin.target.decode([*text[:9], 7])
        row = twin.row(held(engine))
        assert results[0].token_ids[0] == reference_token(row, GREEDY, 0, text, len(text))
        engine.check_integrity()
        for sequence_id in (1, 2):
            engine.free(sequence_id)


def test_what_a_failed_rewind_has_lost_is_read_again(
    twin: Twin, engine: TranslatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's cache ends where the rewind went; the caller's text goes on behind it."""
    text = list(twin.text(16))
    engine.add(1)
    engine.step([item(0, text)])
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine._runner, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step([item(5, [400])])
    assert len(held(engine)) < len(twin.naive(text))
    result = engine.step([item(engine.cached_len(1), [7])])[0]
    assert twin.draft.decode(held(engine)) == twin.target.decode([*text, 7])
    assert result.token_ids[0] == reference_token(twin.row(held(engine)), GREEDY, 0, text, 16)


def test_slips_of_the_caller(twin: Twin, engine: TranslatedEngine) -> None:
    engine.add(1)
    for wrong, sentence in [
        (item(0, [twin.target.size]), "outside"),
        (item(1, [5]), "start 1"),
        (replace(item(0, [5]), sequence_id=3), "unknown sequence 3"),
        (replace(item(0, [5]), num_prompt_logprobs=1), "scores no prompts"),
    ]:
        with pytest.raises(LocalProtocolError, match=sentence):
            engine.step([wrong])
    assert engine.step([]) == []
    engine.free(17)


def test_it_verifies_too(twin: Twin, engine: TranslatedEngine) -> None:
    """Nobody asks a draft, but it is an engine like any other."""
    text = twin.text(12)
    engine.add(1)
    law = engine.step([item(0, text, COUPLED, rule=Propose(1))])[0]
    num_accepted = 0
    for draw in range(20):
        rule = Verify(VerificationMode.REJECTION, law.draft_probs, draw)
        wanted = StepItem(1, 11, (text[11], *law.token_ids), 2, COUPLED, 0, rule)
        result = engine.step([wanted])[0]
        assert result.num_accepted in (0, 1)
        num_accepted += result.num_accepted
    assert num_accepted > 10  # nearly the law that it was drawn from


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"target_tokenizer": "toy"}, "no tokenizer file"),
        ({"target_tokenizer": "/absent"}, "neither a folder"),
    ],
)
def test_refused(fields: dict[str, object], sentence: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(folders, **fields)


def test_a_toy_translates_nothing(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="toy has no tokenizer"):
        load_engine(ModelConfig(source="toy", target_tokenizer=str(folders["target"])))


def test_configurations_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="do not go together"):
        ModelConfig(target_tokenizer="x", tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"draft\.model"):
        TargetConfig(model=ModelConfig(target_tokenizer="x"))


def test_more_ids_than_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    own = save_pair(tmp_path, vocab_size=100)
    with pytest.raises(ConfigError, match="only 100 rows"):
        load({"draft": own["draft"], "target": folders["target"]})
    assert len(read_ids(own["draft"])) > 100
