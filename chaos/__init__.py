"""Breaks Paceline on purpose and says what its clients saw. See README.md in this folder."""

import os

# gRPC tells every peer that hangs up, and reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# And Ray how long its own processes may take to start: this machine may be busy.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
