"""Grafana dashboards and Prometheus rules, made from the catalog of metrics. Pure.

`files.generated` is everything under deploy/grafana and deploy/prometheus; `paceline dashboards`
writes it. Knows no Grafana and no Prometheus: only what they read.
"""
