"""Generated from protos/paceline/rpc/v1 by `make protos`; do not edit."""
