"""Do a draft and a target fit? Pure: both sides ask, and answer with a sentence.

Vocabulary sizes are the tokenizers', so they must be equal even where the models' output layers
are padded differently.
"""

from __future__ import annotations

from paceline.protocol.messages import Hello, Welcome


def misfit(hello: Hello, welcome: Welcome) -> str | None:
    """Why this draft cannot serve this target, None when it can."""
    if hello.protocol_version != welcome.protocol_version:
        return (
            f"protocol versions differ: draft {hello.protocol_version}, "
            f"target {welcome.protocol_version}; upgrade the older one"
        )
    if hello.vocab_size != welcome.vocab_size:
        return (
            f"vocabulary sizes differ: draft {hello.vocab_size} ({hello.model_id}), "
            f"target {welcome.vocab_size} ({welcome.model_id})"
        )
    if hello.tokenizer_hash != welcome.tokenizer_hash:
        return (
            f"tokenizers differ: draft {hello.tokenizer_hash} ({hello.model_id}), "
            f"target {welcome.tokenizer_hash} ({welcome.model_id})"
        )
    return None
