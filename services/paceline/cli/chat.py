"""`paceline chat`: its options. The conversation itself is `chat_talk`'s."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import DEFAULT_URL, ApiKey, Method, Url

Prompt = Annotated[
    str | None, typer.Argument(help="One question; without it, a conversation or stdin.")
]
Model = Annotated[str, typer.Option(help="A served model; default: the first.")]
System = Annotated[str, typer.Option(help="The system prompt.")]
Temperature = Annotated[
    float | None, typer.Option(min=0, max=2, help="0 is greedy; default: the service's.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Same seed, same text.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer.")]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="The target alone.")]
ShowRounds = Annotated[
    bool, typer.Option("--show-rounds", help="A table of the rounds below each answer.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per answer, no text.")]


def chat(
    prompt: Prompt = None,
    url: Url = DEFAULT_URL,
    model: Model = "",
    system: System = "",
    temperature: Temperature = None,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    method: Method = None,
    no_draft: NoDraft = False,
    show_rounds: ShowRounds = False,
    as_json: AsJson = False,
    api_key: ApiKey = "",
) -> None:
    """Talk to a running service; tokens are colored by where they came from.

    \b
      green   accepted: a proposed token, confirmed by the target
      yellow  recovered: the target's token in place of a rejected one
      cyan    bonus: the target's own token after a full acceptance
      plain   nothing was proposed

    \b
    Examples:
      paceline chat
      paceline chat "Why is the sky blue?" --temperature 0 --show-rounds
      git diff | paceline chat --system "Review this." --json
    """
    from paceline.cli.chat_session import Settings
    from paceline.cli.chat_talk import run
    from paceline.errors import ConfigError

    if no_draft and method not in (None, "off"):
        raise ConfigError(f"--no-draft is --method off: it contradicts --method {method}")
    if as_json and show_rounds:
        raise ConfigError("--json prints no table of rounds: leave --show-rounds out")
    method = "off" if no_draft else method
    settings = Settings(model, system, temperature, seed, max_tokens, method, None, show_rounds)
    run(prompt, url, api_key, settings, as_json)
