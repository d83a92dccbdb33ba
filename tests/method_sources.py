"""What may make proposals under each method."""

SOURCES: dict[str, set[str]] = {
    "model": {"model"},
    "ngram": {"ngram"},
    "suffix": {"suffix"},
    "medusa": {"medusa"},
    "hybrid": {"model", "suffix"},
    "auto": {"model", "suffix", "ngram", "medusa"},
    "off": set(),
}
