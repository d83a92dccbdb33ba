"""The wire between drafts and targets; the only folder that imports grpc or generated code."""
