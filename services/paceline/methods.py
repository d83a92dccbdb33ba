"""Where proposals come from: the names of `speculation.method`, for configurations and requests.

`model` is a draft replica. `ngram` and `suffix` look the text up in itself (suffix also in recent
outputs), `medusa` asks heads on the target's own hidden states; these run inside the target.
`hybrid` lets a lookup fill in where the draft replica's window is empty, `auto` takes the one of
all that is measured to gain most, `off` none. All are exact: what is proposed decides about speed
only.
"""

from __future__ import annotations

from typing import Literal, get_args

SpeculationMethod = Literal["model", "ngram", "suffix", "medusa", "hybrid", "auto", "off"]
METHODS: tuple[SpeculationMethod, ...] = get_args(SpeculationMethod)

# What one round's proposals really came from: `RoundDelta.source`; "" when there were none.
ProposalSource = Literal["", "model", "ngram", "suffix", "medusa"]
SOURCES: tuple[ProposalSource, ...] = get_args(ProposalSource)
LOCAL_SOURCES: tuple[ProposalSource, ...] = ("ngram", "suffix", "medusa")
LOOKUPS: tuple[ProposalSource, ...] = ("ngram", "suffix")  # of these, those that read the text
