"""Adds measurements, comparisons and baselines to the product, if `labs` is installed."""

COMMANDS = {
    "bench": "labs.cli.bench:add_bench_command",
    "simulate": "labs.cli.simulate:add_simulate_command",
    "tune": "labs.cli.tune:add_tune_command",
    "pools": "labs.cli.pools:add_pools_command",
}

PLAN = "labs.cli.capacity:add_capacity_flags"
"""The function that adds the flags of capacity to `sluice plan`."""

CHOICES = "labs.choices"
"""The module that adds choices to those of the core when it is imported."""

ROUTINGS = "labs.routings"
"""The module that adds ways to pick a replica when it is imported."""

WHAT_IF = "labs.what_if.process"
"""The program that answers a `gateway.admin.recent_traffic.WhatIfQuestion`."""
