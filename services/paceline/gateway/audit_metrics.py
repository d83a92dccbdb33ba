"""The audit's counts as the catalog's metrics, also from a thread while they grow. Knows no audit
under way."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.gateway.audit_samples import AuditCounts, Skip
from paceline.metrics import audit_catalog as catalog
from paceline.metrics.snapshot import Snapshot


def fill_audit(snapshot: Snapshot, counts: Mapping[str, AuditCounts]) -> None:
    """`counts` by served model."""
    for model, of_model in counts.items():
        snapshot.put(catalog.REQUESTS, of_model.num_requests, model)
        snapshot.put(catalog.TOKENS, of_model.num_tokens, model)
        snapshot.put(catalog.TIES, of_model.num_ties, model)
        snapshot.put(catalog.MISMATCHES, of_model.num_mismatches, model)
        snapshot.put(catalog.ALARMS, of_model.num_alarms, model)
        skipped = {skip.value: of_model.skipped.get(skip, 0) for skip in Skip}
        snapshot.put_each(catalog.SKIPPED, skipped, model)
        snapshot.put(catalog.E_VALUE, of_model.e_value, model)
