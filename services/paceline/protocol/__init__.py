"""The pure core: messages, sessions, link states. No I/O, no clock, no randomness."""
