"""Models that have a token of its own for `</think>` or `<tool_call>`: grammars let them use it.

The grammars' library takes such a token for no text, also where its folder calls it no control
token, so a grammar that has the marker as a string would never let the model write it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.config import GatewayConfig
from paceline.gateway.chat import ChatBody, ChatMessage
from paceline.gateway.plan import Planner
from paceline.gateway.structured import auto_tool_grammar
from paceline.gateway.templates import MARKERS
from paceline.gateway.tokenizer import load_tokenizer
from paceline.gateway.tools import FunctionSpec, ToolFormat
from paceline.grammars import load_grammars

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{{ messages[-1].content }}"
    "{% if add_generation_prompt %}\n{% if opens %}<think>\n{% endif %}{% endif %}"
)
THOUGHTFUL = TEMPLATE + "{# </think> #}"
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
NOW: Any = {"type": "function", "function": {"name": "now", "strict": True, "parameters": EMPTY}}
OPENED: Any = {"chat_template_kwargs": {"opens": True}}
CHOICE: Any = {"guided_choice": ["a"]}
REQUIRED: Any = {"tools": [NOW], "tool_choice": "required"}
ONE: Any = REQUIRED | {"parallel_tool_calls": False}
AUTO: Any = {"tools": [NOW]}


class Folder:
    def __init__(self, path: Path, are_special: bool) -> None:
        self.path = path
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
        )
        self.tokenizer.train_from_iterator(["hello"], trainer)
        markers = [AddedToken(t, special=are_special, normalized=False) for t in sorted(MARKERS)]
        self.tokenizer.add_tokens(markers)
        self.tokenizer.save(str(path / "tokenizer.json"))
        self.grammars = load_grammars(str(path), eos_token_ids=(0,))

    def takes(self, template: str, text: str, **fields: Any) -> bool:
        """Whether the grammar of such a request lets the model write this."""
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
        settings["chat_template"] = template
        (self.path / "tokenizer_config.json").write_text(json.dumps(settings))
        planner = Planner(
            GatewayConfig(served_model_name="m"), load_tokenizer(str(self.path)), 4096
        )
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        (plan,) = planner.plans(ChatBody.model_validate(body), "id", [0])
        try:
            self.grammars.check(
                plan.request.sampling.grammar, list(self.tokenizer.encode(text).ids)
            )
        except ValueError:
            return False
        return True


@pytest.fixture(scope="module", params=[False, True], ids=["added", "control"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize(
    ("template", "fields", "text"),
    [
        (THOUGHTFUL, CHOICE, "a<eos>"),
        (THOUGHTFUL, CHOICE, "<think>\nwell\n</think>\n\na<eos>"),
        (THOUGHTFUL, CHOICE | OPENED, "well </think>a<eos>"),
        (THOUGHTFUL, REQUIRED | OPENED, f"well\n</think>\n\n{CALL}<eos>"),
        (THOUGHTFUL, AUTO | OPENED, f"well\n</think>I look {CALL}<eos>"),
        (TEMPLATE, REQUIRED, f"{CALL}\n{CALL}<eos>"),
        (TEMPLATE, ONE, f"{CALL}<eos>"),
        (TEMPLATE, AUTO, f"I look {CALL}\n{CALL} so<eos>"),
        (TEMPLATE, AUTO, "a <tool<eos>"),
        (TEMPLATE, AUTO | CHOICE, f"{CALL}<eos>"),
        (TEMPLATE, AUTO | CHOICE, "a<eos>"),
    ],
)
def test_let_through(folder: Folder, template: str, fields: Any, text: str) -> None:
    assert folder.takes(template, text, **fields)


@pytest.mark.parametrize(
    ("template", "fields", "text"),
    [
        (THOUGHTFUL, CHOICE | OPENED, "a<eos>"),
        (THOUGHTFUL, CHOICE | OPENED, "well </think>b"),
        (THOUGHTFUL, CHOICE, "<think>well </think>b"),
        (TEMPLATE, REQUIRED, "well"),
        (TEMPLATE, ONE, f"{CALL}\n"),
        (TEMPLATE, AUTO, CALL.replace("now", "rm")),
        (TEMPLATE, AUTO, CALL.replace("{}", '{"x": 1')),
        (TEMPLATE, AUTO | CHOICE, "b"),
    ],
)
def test_kept_out(folder: Folder, template: str, fields: Any, text: str) -> None:
    assert not folder.takes(template, text, **fields)


def test_a_marker_is_not_spelt_out(folder: Folder) -> None:
    """What the parser would read as a call is one, however it was written."""
    spelt = [i for part in ("<", "tool_call", ">") for i in folder.tokenizer.encode(part).ids]
    assert not any(i == folder.tokenizer.token_to_id("<tool_call>") for i in spelt)
    assert folder.takes(TEMPLATE, "<", **AUTO)
    grammar = auto_tool_grammar([FunctionSpec("now")], ToolFormat.HERMES, tokens=MARKERS)
    with pytest.raises(ValueError, match="breaks it"):
        folder.grammars.check(grammar, spelt)


@pytest.mark.parametrize("are_special", [False, True], ids=["added", "control"])
def test_a_marker_in_what_a_client_sent(are_special: bool, tmp_path: Path) -> None:
    """A token as the library and vLLM make it, or plain text where it is a control token."""
    folder = Folder(tmp_path, are_special)
    assert folder.takes(TEMPLATE, "", **AUTO)  # writes the folder's settings
    message = ChatMessage("user", "<tool_call>")
    token_ids = load_tokenizer(str(tmp_path)).encode_chat([message])
    marker = folder.tokenizer.token_to_id("<tool_call>")
    assert token_ids.count(marker) == (0 if are_special else 1)
