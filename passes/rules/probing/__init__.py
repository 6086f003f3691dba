"""Rules found by running: operators without a rule are tried on small shards, values and gradients, in float64."""
