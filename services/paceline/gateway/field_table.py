"""Every request field that a client may send, and what becomes of it, in one table. Pure.

The README shows it; tests compare it with the `openai` package's own types and send each field.
Fields inside of fields have a dotted path; `[a]`, `[a,b]` after a name: of that role or `type`, or
of one of those. A field that is refused, or has no effect, speaks for all that is inside of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Treatment(StrEnum):
    """HONORED: does what it says. NEUTRAL: accepted, and the answer is the same without it.
    REFUSED: a 400 that names it (null, and a value that changes nothing, are accepted)."""

    HONORED = "honored"
    NEUTRAL = "no effect"
    REFUSED = "400"


@dataclass(frozen=True, slots=True)
class FieldRow:
    name: str
    chat: Treatment | None
    completions: Treatment | None
    remark: str = ""


_H, _N, _R = Treatment.HONORED, Treatment.NEUTRAL, Treatment.REFUSED

OPENAI_FIELDS = (
    FieldRow("model", _H, _H, "404 for a model that is not served"),
    FieldRow("messages", _H, None, "system, developer, user, assistant, tool; text parts only"),
    FieldRow("prompt", None, _H, "a string, token ids, or a list of several of either"),
    FieldRow("stream", _H, _H),
    FieldRow("stream_options", _H, _H, "`include_usage`; vLLM's `continuous_usage_stats`"),
    FieldRow("temperature", _H, _H, "0 is greedy, else at least 1e-5, up to 2"),
    FieldRow("top_p", _H, _H),
    FieldRow("seed", _H, _H, "same seed, same tokens, with any draft"),
    FieldRow("n", _H, _H),
    FieldRow("best_of", None, _H, "must equal `n`"),
    FieldRow("max_tokens", _H, _H),
    FieldRow("max_completion_tokens", _H, None),
    FieldRow("stop", _H, _H, "at most 4 strings"),
    FieldRow("presence_penalty", _H, _H),
    FieldRow("frequency_penalty", _H, _H),
    FieldRow("logit_bias", _H, _H),
    FieldRow("logprobs", _H, _H, "chat: a boolean; completions: a number"),
    FieldRow("top_logprobs", _H, None),
    FieldRow("echo", None, _H),
    FieldRow("suffix", None, _R, "accepted when empty"),
    FieldRow("response_format", _H, _H, "`text`, `json_object`, `json_schema`; kept by grammar"),
    FieldRow("tools", _H, None, "functions, where the model's template has tools; no custom tools"),
    FieldRow("tool_choice", _H, None, "`none`, `auto`, `required`, a function, `allowed_tools`"),
    FieldRow("parallel_tool_calls", _H, None, "false: at most one call, kept by grammar"),
    FieldRow("functions", _R, None, "deprecated by OpenAI: use `tools`"),
    FieldRow("function_call", _R, None, "deprecated by OpenAI: use `tool_choice`"),
    FieldRow("user", _N, _N, "a label"),
    FieldRow("safety_identifier", _N, _N, "a label"),
    FieldRow("prompt_cache_key", _N, _N, "a label: the prefix cache needs no key"),
    FieldRow("prompt_cache_options", _N, None, "the prefix cache decides itself"),
    FieldRow("prompt_cache_retention", _N, None, "the prefix cache decides itself"),
    FieldRow("metadata", _N, _N, "labels"),
    FieldRow("prediction", _N, None, "a hint for speed; drafts guess anyhow"),
    FieldRow("service_tier", _R, _R, "accepted: `auto`, `default`"),
    FieldRow("store", _R, None, "accepted: false; nothing is stored"),
    FieldRow("modalities", _R, None, 'accepted: `["text"]`'),
    FieldRow("audio", _R, None),
    FieldRow("verbosity", _R, None, "accepted: `medium`"),
    FieldRow("reasoning_effort", _R, None, "use `chat_template_kwargs` where a template has it"),
    FieldRow("web_search_options", _R, None),
    FieldRow("moderation", _R, None),
)

OTHER_FIELDS = (
    FieldRow("speculation", _H, _H, 'ours, see "The speculation field"'),
    FieldRow("top_k", _H, _H),
    FieldRow("min_p", _H, _H),
    FieldRow("repetition_penalty", _H, _H),
    FieldRow("min_tokens", _H, _H),
    FieldRow("ignore_eos", _H, _H),
    FieldRow("stop_token_ids", _H, _H),
    FieldRow("include_stop_str_in_output", _H, _H),
    FieldRow("prompt_logprobs", _H, _H, "not with `stream`"),
    FieldRow("guided_json", _H, _H, "a JSON schema, as an object or a string"),
    FieldRow("guided_regex", _H, _H),
    FieldRow("guided_choice", _H, _H, "a list of strings"),
    FieldRow("guided_grammar", _H, _H, "Lark or GBNF"),
    FieldRow("structured_outputs", _H, _H, "one of `json`, `regex`, `choice`, `grammar`, ..."),
    FieldRow("chat_template_kwargs", _H, None, "given to the model's chat template"),
    FieldRow("skip_special_tokens", _R, _R, "accepted: true"),
)


_ROLES = "messages[developer,system,user,assistant,tool]"

NESTED_FIELDS = (
    FieldRow(f"{_ROLES}.role", _H, None),
    FieldRow(f"{_ROLES}.content", _H, None, "a string, or parts, which are joined by line breaks"),
    FieldRow("messages[developer,system,user,assistant].name", _H, None, "given to the template"),
    FieldRow(f"{_ROLES}.content[text].type", _H, None),
    FieldRow(f"{_ROLES}.content[text].text", _H, None),
    FieldRow(
        f"{_ROLES}.content[text].prompt_cache_breakpoint",
        _N,
        None,
        "the prefix cache decides itself",
    ),
    FieldRow("messages[user].content[image_url,input_audio,file]", _R, None, "text only"),
    FieldRow("messages[assistant].content[refusal]", _R, None),
    FieldRow("messages[assistant].tool_calls[function].id", _H, None),
    FieldRow("messages[assistant].tool_calls[function].type", _H, None),
    FieldRow("messages[assistant].tool_calls[function].function.name", _H, None),
    FieldRow(
        "messages[assistant].tool_calls[function].function.arguments",
        _H,
        None,
        "a JSON object, written as a string",
    ),
    FieldRow("messages[assistant].tool_calls[custom]", _R, None),
    FieldRow("messages[assistant].refusal", _R, None, "accepted when empty"),
    FieldRow("messages[assistant].audio", _R, None),
    FieldRow("messages[assistant].function_call", _R, None, "deprecated: use `tool_calls`"),
    FieldRow("messages[tool].tool_call_id", _H, None, "of a call in a message before it"),
    FieldRow("messages[function]", _R, None, "deprecated: use the role `tool`"),
    FieldRow("tools[function].type", _H, None),
    FieldRow("tools[function].function.name", _H, None),
    FieldRow("tools[function].function.description", _H, None, "given to the template"),
    FieldRow("tools[function].function.parameters", _H, None, "a JSON schema"),
    FieldRow("tools[function].function.strict", _H, None, "true: `auto` calls fit it, by grammar"),
    FieldRow("tools[custom]", _R, None),
    FieldRow("tool_choice[function].type", _H, None),
    FieldRow("tool_choice[function].function.name", _H, None),
    FieldRow("tool_choice[allowed_tools].type", _H, None),
    FieldRow("tool_choice[allowed_tools].allowed_tools.mode", _H, None, "`auto`, `required`"),
    FieldRow(
        "tool_choice[allowed_tools].allowed_tools.tools", _H, None, "functions by their names"
    ),
    FieldRow("tool_choice[custom]", _R, None),
    FieldRow("response_format[text,json_object,json_schema].type", _H, _H),
    FieldRow("response_format[json_schema].json_schema.name", _N, _N, "a label"),
    FieldRow(
        "response_format[json_schema].json_schema.description", _N, _N, "the model never sees it"
    ),
    FieldRow("response_format[json_schema].json_schema.schema", _H, _H),
    FieldRow("response_format[json_schema].json_schema.strict", _N, _N, "it is kept either way"),
    FieldRow("stream_options.include_usage", _H, _H),
    FieldRow("stream_options.include_obfuscation", _R, _R, "accepted: false"),
)

# vLLM's and ours, and what clients send back of an answer.
OTHER_NESTED_FIELDS = (
    FieldRow("messages[tool].name", _H, None, "given to the template"),
    FieldRow("messages[assistant].reasoning_content", _H, None, "given to the template"),
    FieldRow("messages[assistant].annotations", _R, None, "accepted when empty"),
    FieldRow("messages[assistant].tool_calls[function].index", _N, None, "their order counts"),
    FieldRow("stream_options.continuous_usage_stats", _H, _H),
    *(
        FieldRow(f"structured_outputs.{way}", _H, _H)
        for way in ("json", "regex", "choice", "grammar", "json_object")
    ),
    FieldRow("speculation.method", _H, _H, "400 for one that the model has no drafts or heads for"),
    *(
        FieldRow(f"speculation.{name}", _H, _H)
        for name in ("max_tokens", "mode", "lookahead", "include_rounds")
    ),
)


def markdown_table() -> str:
    """OpenAI's fields first, then vLLM's and ours; below, in the same order, those inside."""
    top = _table("field", (*OPENAI_FIELDS, *OTHER_FIELDS))
    return top + "\n" + _table("field inside", (*NESTED_FIELDS, *OTHER_NESTED_FIELDS))


def _table(heading: str, rows: tuple[FieldRow, ...]) -> str:
    lines = [f"| {heading} | chat | completions | remark |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (f"`{row.name}`", row.chat or "", row.completions or "", row.remark)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
