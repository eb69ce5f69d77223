"""What devices together and apart could serve, by arithmetic: equal requests, Poisson arrivals, the step times.

Together, a step takes as many tokens of prompts beside its decodes as keep it within the time between tokens; or whole
prompts come first, and decodes wait for them, as in engines without chunks. Apart, a device computes one prompt after
another, and one that goes on has as many decodes as keep a step within that time. Where prompts come one after another
their mean wait is that of an M/D/1 queue,

    first token = D + rho D / 2 (1 - rho)        seconds, of D seconds each at a utilisation of rho

as DistServe has it (Zhong et al., OSDI 2024, section 3.1). `sluice pools` simulates what this leaves out: lengths that
differ, the order of requests, preemptions.
"""

from dataclasses import dataclass, replace
from math import log

from admission.simulation.device import Device
from admission.simulation.pools.link import Link
from admission.step_times.step_time import StepWork, prefill_work

DEVICES = 8  # that are split
WORTH = 1.05  # times the requests of devices together, from which devices apart are said to pay
STEPS = 1.05  # between two times that `pays_up_to` tries
SLOWEST = 50.0  # times a step of one decode, up to which it tries
BATCHES = 1.05  # between two numbers of decodes that are tried


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests that are all alike, and what each wants. Lengths are in tokens, times in seconds."""

    prompt: int
    answer: int
    first_token: float  # on average
    per_token: float

    @property
    def context(self) -> float:
        """The tokens that a decode attends to, on average."""
        return self.prompt + self.answer / 2


@dataclass(frozen=True, slots=True)
class Together:
    """The most that a device which does both can serve."""

    rate: float  # requests a second; 0: no request can be as is wanted
    decodes: int = 0  # in each step
    decode_step: float = 0.0  # seconds of a step of these alone
    chunk: int = 0  # tokens of prompts that a step has beside them


@dataclass(frozen=True, slots=True)
class Apart:
    """The most that a device can serve, on average over the best split of `DEVICES`."""

    rate: float  # requests a second; 0: no request can be as is wanted
    prefill: int  # of the devices
    prompt_seconds: float
    prefill_rate: float  # requests a second of a device that computes prompts
    decodes: int
    decode_step: float
    decode_rate: float  # requests a second of a device that goes on
    link_seconds: float  # of a prompt's transfer


def together(device: Device, shape: Shape) -> Together:
    """Returns the largest rate over the number of decodes in a step."""
    return max((_beside(device, shape, decodes) for decodes in _batches(device, shape)), key=lambda one: one.rate)


def prompts_first(device: Device, shape: Shape) -> Together:
    """Returns the same for a device whose decodes wait for whole prompts: on average they are as often as is wanted."""
    prompt = device.seconds(prefill_work(0, shape.prompt))
    busiest = _utilisation(prompt, shape.first_token)
    found = Together(0.0)
    for decodes in _batches(device, shape):
        step = _decodes(device, shape, decodes)
        busy = min(busiest, decodes * prompt / (shape.answer * step + decodes * prompt), 1 - step / shape.per_token)
        if busy / prompt > found.rate:
            found = Together(busy / prompt, decodes, step, shape.prompt)
    return found


def apart(device: Device, shape: Shape, link: Link) -> Apart:
    assert device.kv_bytes_per_token is not None
    sent = link.seconds(shape.prompt * device.kv_bytes_per_token)
    prompt = device.seconds(prefill_work(0, shape.prompt))
    prefill_rate = min(_utilisation(prompt, shape.first_token) / prompt, 1 / sent)
    most = shape.per_token - (sent + link.latency) / max(1, shape.answer - 1)  # seconds of a step
    steps = ((number, _decodes(device, shape, number)) for number in _batches(device, shape))
    fitting = [(number, seconds) for number, seconds in steps if seconds <= most]
    decodes, step = max(fitting, key=lambda one: one[0] / one[1], default=(0, 0.0))
    decode_rate = decodes / shape.answer / step if decodes else 0.0
    rates = [min(n * prefill_rate, (DEVICES - n) * decode_rate) / DEVICES for n in range(1, DEVICES)]
    prefill = rates.index(max(rates)) + 1
    return Apart(max(rates), prefill, prompt, prefill_rate, decodes, step, decode_rate, sent)


def pays(device: Device, shape: Shape, link: Link) -> bool:
    """Returns True where devices apart serve more, by `WORTH` times."""
    return apart(device, shape, link).rate > WORTH * together(device, shape).rate


def pays_up_to(device: Device, shape: Shape, link: Link) -> float | None:
    """Returns the longest time between tokens, in seconds and to 2.5 %, at which devices apart pay; None: they never
    do.
    """
    least = _decodes(device, shape, 1)
    number = round(log(SLOWEST, STEPS))
    times = (least * STEPS**power for power in range(number, 0, -1))  # the longest first
    longest = next((seconds for seconds in times if pays(device, replace(shape, per_token=seconds), link)), None)
    if longest is None:
        return None
    between = longest * STEPS**0.5
    return between if pays(device, replace(shape, per_token=between), link) else longest


def _utilisation(seconds: float, first_token: float) -> float:
    """Returns the most of a device's time that prompts of so many seconds may take, one after another."""
    spare = max(0.0, first_token - seconds)
    return 2 * spare / (seconds + 2 * spare)


def _beside(device: Device, shape: Shape, decodes: int) -> Together:
    step = _decodes(device, shape, decodes)
    chunk = _chunk(device, shape, decodes)
    if not chunk:
        return Together(0.0)
    full = _mixed(device, shape, decodes, chunk)
    prompt = shape.prompt / chunk * full  # seconds, in steps that are full
    turns = decodes * prompt / shape.answer  # seconds of decodes alone, by `step`, that answer as many as are computed
    busy = turns / step / (1 + turns / step - turns / full)  # the share of the time in such steps
    return Together(min(busy, _utilisation(prompt, shape.first_token)) / prompt, decodes, step, chunk)


def _chunk(device: Device, shape: Shape, decodes: int) -> int:
    """Returns the most tokens of a prompt that a step within the time has beside so many decodes."""
    low, high = 0, shape.prompt
    while low < high:
        middle = (low + high + 1) // 2
        if _mixed(device, shape, decodes, middle) <= shape.per_token:
            low = middle
        else:
            high = middle - 1
    return low


def _mixed(device: Device, shape: Shape, decodes: int, chunk: int) -> float:
    begun = (shape.prompt - chunk) // 2  # computed before a chunk, on average
    prefill = prefill_work(begun, chunk)
    return device.seconds(prefill + StepWork(0, decodes, round(decodes * shape.context)))


def _decodes(device: Device, shape: Shape, decodes: int) -> float:
    return device.seconds(StepWork(0, decodes, round(decodes * shape.context)))


def _batches(device: Device, shape: Shape) -> list[int]:
    """Returns the numbers of decodes that fit the memory: all, or some that are `BATCHES` apart."""
    most = max(1, device.kv_tokens // (shape.prompt + shape.answer))
    numbers = [1]
    while numbers[-1] < most:
        numbers.append(min(most, max(numbers[-1] + 1, round(numbers[-1] * BATCHES))))
    return numbers
