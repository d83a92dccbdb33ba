"""Breaks Paceline on purpose and says what its clients saw. See README.md in this folder."""

import os

# gRPC tells every peer that hangs up, and reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
