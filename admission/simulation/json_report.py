"""A comparison as JSON: every figure of every run, and what was asked."""

import json
from dataclasses import asdict

from admission.simulation.study import Results


def to_json(results: Results, facts: dict[str, object]) -> str:
    """Durations in seconds, shares in [0, 1]; numbers that were not measured are null."""
    study = results.study
    policies = [
        {
            "name": policy.name,
            "core": asdict(policy.core),
            "engine": asdict(policy.engine),
            "runs": [asdict(summary) for summary in runs],
        }
        for policy, runs in zip(study.policies, results.runs, strict=True)
    ]
    good = study.judged_by  # null: each policy's own targets
    report = {**facts, "device": study.device.name, "objective": good and asdict(good), "policies": policies}
    return json.dumps(report, indent=1, allow_nan=False)
