"""Four tenants that always have work waiting, under each ordering: how far does their service drift apart?

    python -m benchmarks.fairness [--seeds 5] [--seconds 300]

Llama-3-8B on an A100 (simulated), 10,000 tokens of KV memory, tokens as the unit of account (prompt 1, output 2). The
tenants differ in the size of their requests, 80 to 1,100 weighted tokens, and in what they offer: all more than their
share. Prints medians over seeds, with the lowest and the highest.
"""

from argparse import ArgumentParser
from dataclasses import dataclass
from random import Random
from statistics import median

from admission.simulation.arrival import Arrival
from admission.simulation.device import DEVICES
from admission.simulation.loop import Loop
from admission.simulation.policy import parse_policy
from admission.simulation.recorder import Objective, Recorder

DEVICE = DEVICES["llama3-8b-a100"]
MEMORY = "kv_tokens=10000,max_model_len=4096,max_num_seqs=64,max_waiting=1000000"
POLICIES = {
    "virtual token counter": "order=vtc",
    "fair, Q = 512": "order=fair,quantum=512,borrow=0",
    "fair, Q = 4096": "order=fair,quantum=4096,borrow=0",
    "first come, first served": "order=fcfs",
    "virtual finish with boost": "order=virtual_finish",
    "round robin by request": "order=round_robin",
}


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    prompt: int  # mean tokens
    output: int
    rate: float  # requests a second


TENANTS = (
    Tenant("autocomplete", 40, 20, 30.0),
    Tenant("chat", 200, 100, 9.0),
    Tenant("summaries", 700, 80, 4.0),
    Tenant("writing", 300, 400, 4.0),
)


def arrivals(seed: int, seconds: float) -> list[Arrival]:
    random = Random(seed)
    made = []
    for tenant in TENANTS:
        time = random.expovariate(tenant.rate)
        while time < seconds:
            prompt, output = (max(1, int(mean * random.uniform(0.5, 1.5))) for mean in (tenant.prompt, tenant.output))
            made.append(Arrival(time, prompt, output, tenant=tenant.name))
            time += random.expovariate(tenant.rate)
    return sorted(made)


def measure(policy: str, seed: int, seconds: float) -> tuple[float, float, float]:
    """Largest service gap in tokens, tokens a second, share of the tenant served least."""
    simulated = parse_policy(f"{policy},unit=tokens,{MEMORY}", DEVICE)
    recorder = Recorder(DEVICE, Objective(), {})
    Loop(simulated.make_core(), DEVICE, recorder, simulated.engine.max_model_len).run(arrivals(seed, seconds), seconds)
    services = [tenant.service for tenant in recorder.tenants.values()]
    return recorder.gap_tokens.largest, sum(services) / seconds, min(services) / sum(services)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    print(f"{'ordering':28}{'service gap, tokens':>30}{'tokens/s':>12}{'least share':>14}")
    for name, policy in POLICIES.items():
        runs = [measure(policy, seed, options.seconds) for seed in range(1, options.seeds + 1)]
        gaps, rates, shares = zip(*runs, strict=True)
        spread = f"{median(gaps):,.0f} ({min(gaps):,.0f} to {max(gaps):,.0f})"
        print(f"{name:28}{spread:>30}{median(rates):>12,.0f}{median(shares):>14.1%}", flush=True)


if __name__ == "__main__":
    main()
