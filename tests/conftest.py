"""Hypothesis profiles; nothing with logic. CI is derandomized: a red run is red again."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("dev", max_examples=50, deadline=None, print_blob=True)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
