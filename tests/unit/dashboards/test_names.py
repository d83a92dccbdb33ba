"""Reading the names in a query."""

from __future__ import annotations

import pytest

from paceline.dashboards.names import Selector, mentioned
from paceline.dashboards.promql import Query
from paceline.metrics import target_catalog as target


def test_names_matchers_and_groups() -> None:
    found = mentioned(
        'histogram_quantile(0.95, sum by (le, model_name) (rate(a_bucket{x="1",y=~"b|c"}[5m])))'
        " / (max(d:e:f) > 0) and on (model_name) 1 - g{} == 1e"
    )
    assert found.selectors[0] == Selector("a_bucket", {"x": ("=", "1"), "y": ("=~", "b|c")})
    assert [s.name for s in found.selectors] == ["a_bucket", "d:e:f", "g", "e"]
    assert found.grouped_by == {"le", "model_name"}


@pytest.mark.parametrize("query", ["a{b=c}", "sum by le (a)", "a ? b", "sum by (le"])
def test_what_it_cannot_read_is_refused(query: str) -> None:
    with pytest.raises(ValueError):
        mentioned(query)


def test_a_query_cannot_name_what_is_not_there() -> None:
    query = Query()
    with pytest.raises(ValueError, match="no label draft"):
        query.select(target.ROUNDS, draft="x")
    with pytest.raises(ValueError, match="histogram"):
        query.select(target.QUEUE_TIME)
    with pytest.raises(ValueError, match="no bucket"):
        query.share_up_to(0.3, target.QUEUE_TIME)
    assert query.select(target.ROUNDS) == (
        'paceline_rounds_total{model_name=~"$model_name",replica=~"$replica"}'
    )
    assert Query("5m", has_variables=False).per_s(target.ROUNDS, "replica") == (
        "sum by (replica) (rate(paceline_rounds_total[5m]))"
    )
