"""PURE: proposers that need no network: n-grams, suffixes, trees of Medusa candidates."""
