"""Names, kinds and values of every `paceline_` metric. Pure: no process, no clock, no Ray.

`catalog` declares them, `snapshot` is their plain form on the way from a replica to the gateway,
`exposition` the text that Prometheus reads.
"""
