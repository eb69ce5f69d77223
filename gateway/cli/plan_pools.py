"""The part of `sluice plan` that says whether devices for prompts and devices for answers would serve more."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from admission.simulation.device import Device
from admission.simulation.metrics import format_duration
from admission.simulation.pools.estimate import (
    DEVICES,
    WORTH,
    Apart,
    Shape,
    Together,
    apart,
    pays_up_to,
    prompts_first,
    together,
)
from admission.simulation.pools.link import Link
from admission.simulation.pools.roofline_device import RooflineDevice
from admission.simulation.recorder import Objective
from backend.errors import ConfigError
from gateway.cli.arguments import argument
from gateway.table import table
from quotas.policy import units

ANSWER, GIGABITS = 256, 100.0
GOOD = Objective()


def add_disaggregation(plan: ArgumentParser) -> None:
    group = plan.add_argument_group("prompts and answers apart")
    number = argument(_above_zero)
    group.add_argument(
        "--output-tokens",
        metavar="TOKENS",
        type=argument(units.count),
        default=ANSWER,
        help=f"tokens of each answer to a prompt of --context (default: {ANSWER})",
    )
    group.add_argument(
        "--first-token",
        metavar="S",
        type=number,
        default=GOOD.first_token,
        help=f"seconds in which first tokens are wanted, on average (default: {GOOD.first_token:g})",
    )
    group.add_argument(
        "--per-token",
        metavar="S",
        type=number,
        default=GOOD.per_token,
        help=f"seconds in which each token after it is wanted (default: {GOOD.per_token:g})",
    )
    group.add_argument(
        "--link-gbps",
        metavar="X",
        type=number,
        default=GIGABITS,
        help=f"gigabits a second with which a device sends keys and values (default: {GIGABITS:g})",
    )
    group.add_argument(
        "--save-device", metavar="FILE", type=Path, help="write the floors as a device for sluice simulate and pools"
    )


def disaggregation(device: Device, floor: Device, prompt: int, namespace: Namespace) -> str:
    """Returns what devices together and apart could serve of such requests, with the arithmetic and a verdict, beside
    the verdict by the shortest steps that there are, those of `floor`.
    """
    shape = Shape(prompt, namespace.output_tokens, namespace.first_token, namespace.per_token)
    link = Link(namespace.link_gbps * 1e9 / 8)
    both, whole, split = together(device, shape), prompts_first(device, shape), apart(device, shape, link)
    wanted = (
        f"{format_duration(shape.first_token)} to the first token, {format_duration(shape.per_token)} for each other"
    )
    title = (
        f"prompts of {prompt:,} tokens, answers of {shape.answer:,}, {wanted}; links of {namespace.link_gbps:g} Gb/s"
    )
    rows = [
        ("all together, in chunks", _rate(both.rate), _of_both(both)),
        ("all together, whole prompts first", _rate(whole.rate), _of_whole(whole)),
        (f"{split.prefill} for prompts, {DEVICES - split.prefill} for answers", _rate(split.rate), _of_split(split)),
    ]
    lines = table(("devices", "requests/s each", ""), rows, frozenset({"requests/s each"}))
    at_best = f"with steps at their floor it {_when(pays_up_to(floor, shape, link))}"
    return f"{title}\n{lines}{_verdict(device, shape, link, both, split)}; {at_best}\n"


def save(device: RooflineDevice, path: Path) -> None:
    """Write a device. Raises `ConfigError`."""
    try:
        path.write_text(device.to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save-device {path}: cannot be written ({error.strerror})") from None


def _of_both(one: Together) -> str:
    if not one.rate:
        return "no step with a part of a prompt is as short as is wanted"
    step = format_duration(one.decode_step)
    return f"{one.decodes:,} decodes ({step} alone), and up to {one.chunk:,} tokens of prompts beside them"


def _of_split(one: Apart) -> str:
    if not one.rate:
        what = "a prompt alone takes" if not one.prefill_rate else "one decode and its share of the transfer take"
        return f"{what} longer than is wanted"
    prompts = f"a prompt in {format_duration(one.prompt_seconds)}: {_rate(one.prefill_rate)}/s"
    answers = f"{one.decodes:,} decodes in {format_duration(one.decode_step)}: {_rate(one.decode_rate)}/s"
    return f"{prompts}; sent in {format_duration(one.link_seconds)}; {answers}"


def _of_whole(one: Together) -> str:
    if not one.rate:
        return "a prompt alone, or a step of one decode, takes longer than is wanted"
    return f"{one.decodes:,} decodes ({format_duration(one.decode_step)}), which wait for prompts"


def _verdict(device: Device, shape: Shape, link: Link, both: Together, split: Apart) -> str:
    pays = _when(pays_up_to(device, shape, link))
    if split.rate > WORTH * both.rate:
        more = (
            f"{split.rate / both.rate:.2f} times the requests" if both.rate else "requests that no device serves whole"
        )
        return f"set devices apart, which serves {more}: it {pays}"
    return f"keep them together: setting devices apart {pays}"


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "pays nowhere, however long tokens may take"
    return f"pays where tokens are wanted within {format_duration(seconds)} of each other"


def _rate(rate: float) -> str:
    return f"{rate:.3g}"


def _above_zero(text: str) -> float:
    value = units.number(text)
    if value <= 0:
        raise ValueError("is not above 0")
    return value
