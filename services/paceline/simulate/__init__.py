"""A fleet in an event simulator: what `paceline simulate` runs."""
