"""The policy of a gateway that was given none; policies/default.yaml says the same in YAML."""

from quotas.policy import ClassPolicy, Policy, QueueBounds, TenantPolicy

AGING_STEP = 2.0  # seconds, from one class to the next
BATCH_AGING = 20.0  # seconds, of a class without targets at least: it yields to those that have any

CLASSES = (
    ClassPolicy(
        name="interactive",
        level=0,
        service_tiers=("fast", "priority", "scale"),
        ttft=0.5,
        time_per_output_token=0.04,
        queue=QueueBounds(requests=256, seconds=30.0),
    ),
    ClassPolicy(
        name="standard",
        level=1,
        ttft=2.0,
        time_per_output_token=0.08,
        aging=AGING_STEP,
        queue=QueueBounds(requests=1024, seconds=120.0),
    ),
    ClassPolicy(
        name="batch",
        level=2,
        service_tiers=("flex",),
        aging=BATCH_AGING,
        queue=QueueBounds(requests=4096, seconds=3600.0),
    ),
)
DEFAULTS = TenantPolicy(name="", highest_class="interactive", default_class="standard")
DEFAULT_POLICY = Policy.of(CLASSES, DEFAULTS)
