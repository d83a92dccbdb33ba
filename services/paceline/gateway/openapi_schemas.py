"""What the API's answers look like, and what the request fields mean, as JSON Schema.

Data only. Request bodies come from the pydantic models; here is what those cannot say: sentences,
and the shapes that a field accepts before it is made uniform. Answers are checked against these
by the tests, they are not made from them.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.gateway.responses import Json
from paceline.methods import METHODS, SOURCES

_INT: Json = {"type": "integer", "minimum": 0}
_NUM: Json = {"type": "number"}
_STR: Json = {"type": "string"}
_ANY_OBJECT: Json = {"type": "object"}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: Json, optional: Json | None = None, description: str = "") -> Json:
    schema: Json = {"type": "object", "properties": required | (optional or {})}
    schema["required"] = list(required)
    return schema | ({"description": description} if description else {})


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_STOP_REASON = {"anyOf": [_STR, {"type": "integer"}, {"type": "null"}]}
_ENVELOPE: Json = {"id": _STR, "created": _INT, "model": _STR, "system_fingerprint": {}}
_CALL = _object({"function": _ANY_OBJECT}, {"id": _STR, "type": _STR, "index": _INT})


def _choice(name: str, content: Json, finish: Json) -> Json:
    required: Json = {
        "index": _INT, name: content, "logprobs": _or_null(_ANY_OBJECT), "finish_reason": finish
    }  # fmt: skip
    return _object(required, {"stop_reason": _STOP_REASON, "prompt_logprobs": {}})


def _generation(kind: str, choice: Json, usage: Json, description: str, is_whole: bool) -> Json:
    required = _ENVELOPE | {"object": {"const": kind}, "choices": _list(choice)}
    optional: Json = {"speculation": ref("SpeculationReport"), "prompt_logprobs": {}}
    (required if is_whole else optional)["usage"] = usage
    return _object(required, optional, description)


_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _or_null(_STR)},
    {"refusal": _or_null(_STR), "reasoning_content": _STR, "tool_calls": _list(_CALL)},
)
_DELTA = _object(
    {},
    {
        "role": {"const": "assistant"},
        "content": _or_null(_STR),
        "reasoning_content": _STR,
        "tool_calls": _list(_CALL),
    },
)

SCHEMAS: Mapping[str, Json] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": {"type": "string", "description": "one sentence"},
                    "type": {"enum": ["invalid_request_error", "overloaded_error", "server_error"]},
                    "param": {
                        "type": ["string", "null"],
                        "description": "the field that is wrong, if it is one",
                    },
                    "code": {
                        "type": ["string", "null"],
                        "description": "a word for programs, which stays the same",
                    },
                }
            )
        },
        description="Every answer that is not a success, in OpenAI's shape.",
    ),
    "Usage": _object(
        {
            "prompt_tokens": _INT,
            "completion_tokens": _INT,
            "total_tokens": _INT,
            "prompt_tokens_details": _object({"cached_tokens": _INT}),
            "speculation": _object(
                {
                    "rounds": _INT,
                    "proposed": _INT,
                    "accepted": _INT,
                    "acceptance_rate": _NUM,
                    "mean_accepted_length": _NUM,
                }
            ),
        },
        description="Counts as OpenAI's, and how speculation went.",
    ),
    "SpeculationReport": _object(
        {
            "rounds": _list(
                _object(
                    {
                        "round": _INT,
                        "source": {"enum": list(SOURCES)},
                        "num_speculative_tokens": _INT,
                        "proposed": _INT,
                        "accepted": _INT,
                        "wall_ms": _NUM,
                        "draft_ms": _NUM,
                        "wire_ms": _NUM,
                        "wire_out_ms": _NUM,
                        "window_ms": _NUM,
                        "queue_ms": _NUM,
                        "verify_ms": _NUM,
                        "sample_ms": _NUM,
                        "wire_back_ms": _NUM,
                        "rewind_ms": _NUM,
                    },
                    {"choice": _INT},
                )
            ),
            "pieces": _list(
                _object(
                    {
                        "text": _STR,
                        "origin": {"enum": ["accepted", "recovered", "bonus", "plain"]},
                        "source": {
                            "enum": list(SOURCES),
                            "description": "what proposed an accepted piece; empty for others",
                        },
                    },
                    {"choice": _INT},
                )
            ),
        },
        description="Only with speculation.include_rounds: rounds with times, text with origins.",
    ),
    "Completion": _generation(
        "text_completion", _choice("text", _STR, _FINISH), ref("Usage"), "The whole answer.", True
    ),
    "CompletionChunk": _generation(
        "text_completion",
        _choice("text", _STR, _or_null(_FINISH)),
        _or_null(ref("Usage")),
        "One event of a stream.",
        False,
    ),
    "ChatCompletion": _generation(
        "chat.completion",
        _choice("message", _MESSAGE, _FINISH),
        ref("Usage"),
        "The whole answer.",
        True,
    ),
    "ChatCompletionChunk": _generation(
        "chat.completion.chunk",
        _choice("delta", _DELTA, _or_null(_FINISH)),
        _or_null(ref("Usage")),
        "One event of a stream.",
        False,
    ),
    "Model": _object(
        {
            "id": _STR,
            "object": {"const": "model"},
            "created": _INT,
            "owned_by": _STR,
            "root": _STR,
            "parent": {"type": ["string", "null"]},
            "max_model_len": _INT,
            "speculation_methods": _list({"enum": list(METHODS)})
            | {"description": "what speculation.method may be for this model"},
            "refused_speculation_methods": {
                "type": "object",
                "description": "why it may not be one of the others",
                "propertyNames": {"enum": list(METHODS)},
                "additionalProperties": _STR,
            },
        }
    ),
    "ModelList": _object({"object": {"const": "list"}, "data": _list(ref("Model"))}),
    "Tokens": _object(
        {
            "count": _INT,
            "max_model_len": _INT,
            "tokens": _list(_INT),
            "token_strs": _or_null(_list(_STR)),
        },
        description="`token_strs`: what each token writes on its own; half a character is U+FFFD.",
    ),
    "Prompt": _object({"prompt": _STR}),
    "Status": _object({"status": _STR}),
    "Version": _object({"version": _STR}),
    "Fleet": {
        "type": "object",
        "description": "By model: targets, drafts, what the controller decided. On top: the first.",
    },
}

_TEXT_PARTS = {
    "anyOf": [
        _STR,
        _list(_object({"type": {"const": "text"}, "text": _STR})),
        {"type": "null"},
    ]
}
# Field -> what its schema says besides, or instead where there is a type.
FIELDS: Mapping[str, Json] = {
    "model": {"description": "which of GET /v1/models shall answer"},
    "stream": {"description": "send the answer as it grows, as server-sent events"},
    "stream_options": {"description": "of a stream: what it says besides the text"},
    "include_usage": {"description": "a last chunk with the usage"},
    "continuous_usage_stats": {"description": "every chunk has the usage so far"},
    "include_obfuscation": {"description": "only false: chunks are never padded"},
    "temperature": {"description": "0 is greedy; default 1"},
    "top_p": {"description": "choose among the most likely tokens of so much probability"},
    "top_k": {"description": "choose among so many tokens; 0 and -1: all"},
    "min_p": {"description": "leave out tokens less likely than this share of the likeliest"},
    "presence_penalty": {"description": "of tokens that have come, once"},
    "frequency_penalty": {"description": "of tokens that have come, each time"},
    "repetition_penalty": {"description": "divides logits of tokens that have come; 1: none"},
    "logit_bias": {
        "description": "token id -> what is added to its logit",
        "anyOf": [
            {"type": "object", "additionalProperties": {"type": "number"}},
            {"type": "null"},
        ],
    },
    "seed": {"description": "the same seed and request give the same text"},
    "n": {"description": "choices of one prompt"},
    "max_tokens": {"description": "longest answer; what comes beyond ends in 'length'"},
    "max_completion_tokens": {"description": "OpenAI's newer name of max_tokens"},
    "min_tokens": {"description": "no end before so many tokens"},
    "stop": {
        "description": "texts that end the answer",
        "anyOf": [_STR, _list(_STR), {"type": "null"}],
    },
    "stop_token_ids": {
        "description": "tokens that end the answer",
        "anyOf": [_list(_INT), {"type": "null"}],
    },
    "include_stop_str_in_output": {"description": "show what ended the answer"},
    "ignore_eos": {"description": "go on behind the model's own end"},
    "prompt_logprobs": {"description": "log-probabilities of the prompt's tokens, so many each"},
    "response_format": {
        "description": "text, json_object or json_schema: the answer surely has that form",
        "anyOf": [_ANY_OBJECT, {"type": "null"}],
    },
    "guided_json": {"description": "vLLM's: a JSON schema"},
    "guided_regex": {"description": "vLLM's: a regular expression for the whole answer"},
    "guided_choice": {"description": "vLLM's: a list of possible answers"},
    "guided_grammar": {"description": "vLLM's: a grammar"},
    "structured_outputs": {"description": "vLLM's: an object with one of json, regex, choice, ..."},
    "speculation": {"description": "ours: where proposals come from, and how they are verified"},
    "method": {"description": "where proposals come from; off: nowhere, null: the deployment's"},
    "mode": {"description": "how proposals are verified; it must fit the temperature"},
    "lookahead": {"description": "fixed: always as many proposals as max_tokens says"},
    "include_rounds": {"description": "show rounds with their times and tokens with their origin"},
    "prompt": {"description": "a text, or its token ids"},
    "best_of": {"description": "must equal n: nothing is ranked"},
    "echo": {"description": "the prompt comes first in every choice"},
    "logprobs": {"description": "log-probabilities of the answer's tokens"},
    "top_logprobs": {"description": "so many likely tokens beside each"},
    "messages": {"description": "the conversation so far"},
    "tools": {
        "description": "functions that the model may call",
        "anyOf": [_list(ref("ToolBody")), {"type": "null"}],
    },
    "tool_choice": {
        "description": "none, auto, required, or one function by name",
        "anyOf": [{"enum": ["none", "auto", "required"]}, _ANY_OBJECT, {"type": "null"}],
    },
    "parallel_tool_calls": {"description": "several calls in one answer; default true"},
    "chat_template_kwargs": {"description": "arguments of the model's chat template"},
    "role": {"description": "who says it"},
    "content": {"description": "what is said", **_TEXT_PARTS},
    "name": {"description": "a name"},
    "tool_calls": {
        "description": "calls that the assistant made",
        "anyOf": [_list(ref("ToolCallBody")), {"type": "null"}],
    },
    "tool_call_id": {"description": "which call a message of role tool answers"},
    "reasoning_content": {"description": "what the model thought before it answered"},
    "id": {"description": "of a call"},
    "type": {"description": "always function"},
    "index": {"description": "place of a call among the message's"},
    "function": {"description": "the function"},
    "description": {"description": "what the function is for"},
    "parameters": {"description": "JSON schema of the arguments"},
    "strict": {"description": "arguments surely fit the schema"},
    "arguments": {"description": "a JSON object, written as a string"},
}
# The same, where one body's field differs from the others'.
OWN_FIELDS: Mapping[tuple[str, str], Json] = {
    ("CompletionBody", "logprobs"): {
        "description": "so many likely tokens beside each of the answer's",
        "anyOf": [_INT, {"const": False}, {"type": "null"}],
    },
    ("CompletionBody", "prompt"): {
        "description": "a text, its token ids, or several prompts of one of these kinds; choice "
        "i of prompt p has the index p * n + i, and usage counts all",
        "anyOf": [
            _STR,
            _list(_INT),
            _list(_STR) | {"minItems": 1},
            _list(_list(_INT)) | {"minItems": 1},
        ],
    },
    ("SpeculationOptions", "max_tokens"): {"description": "most proposals in one round; 0: none"},
}
