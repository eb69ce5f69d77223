"""What answers that match a grammar take, and what becomes of them."""

from scripts.grafana.panel import Panel
from scripts.grafana.queries import per, rate, total

GRAMMARS = (
    Panel(
        "Grammars asked for",
        "By what became of them. Much compiled and little cached: each request has a schema of its own.",
        "ops",
        rate("sluice_grammars_total", "end"),
        stack=True,
    ),
    Panel(
        "Compiling",
        "Processor seconds by second, charged to the tenants.",
        "percentunit",
        total("sluice_grammar_compile_seconds_total", "compiling"),
    ),
    Panel(
        "A row's mask",
        "Mean time of grammar processes, mostly while the device computes.",
        "s",
        per("sluice_grammar_mask_seconds_total", "sluice_grammar_rows_total", "mask"),
    ),
    Panel(
        "Forced tokens",
        "Taken at once and not sampled one by one.",
        "short",
        total("sluice_jump_forward_tokens_total", "tokens"),
    ),
    Panel(
        "Answers that could not go on",
        "No token was left to them, or their masks took too much work.",
        "ops",
        total("sluice_grammar_failures_total", "answers"),
    ),
    Panel(
        "Grammar processes that ended",
        "Others took their place. Now and then: look at who asks for what; all the time: memory is short.",
        "ops",
        total("sluice_grammar_restarts_total", "processes"),
    ),
)
