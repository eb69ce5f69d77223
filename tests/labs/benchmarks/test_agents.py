from labs.benchmarks.agents import Run, serve


def test_every_turn_of_every_agent_ends_and_dropped_blocks_are_found_no_more() -> None:
    dropped, kept = (serve(Run("log-normal", 8_000, False, 1, rule, "nothing", agents=2)) for rule in ("drop", "lru"))
    assert dropped.completed == kept.completed >= 16
    assert dropped.session_seconds > 0 and dropped.hit_rate < kept.hit_rate
