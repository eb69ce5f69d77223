"""The event log: each event and each decision of the core, a line each, to be replayed and explained.

Each line is a JSON array. A moment t of the engine's clock and an elapsed time are whole nanoseconds, or seconds if
they have a decimal point; all other times are in seconds. A log of another version is not read.

    ["log", version, engine settings, core settings, coefficients, knee, steps that these count as]   the first line;
                with several models, behind the core settings: [[coefficients, knee, steps] of each further one ...]
    ["gateway", t, Unix seconds, model, bytes of a KV block]     the recording gateway, and the time of day
    ["request", t, id, tenant, key, service tier, body bytes, the client's deadlines in seconds of the first token, the
     last, each further one, [[prompt tokens, most tokens, true if the client declared them, and `true` behind that for
     another answer to the prompt before] ...], refusal or null]
                the demand on a tenant's limits, before the arrival or in its place; a refusal names the limit or the
                reason; without prompts the request was refused unread, because the limit was used up
    ["arrive", t, id, tenant, prompt tokens, max_tokens, allowed tokens, class, interval, body bytes,
     first token by, done by, first token's target, promised first and last token, refusal or null,
     blocks of the prompt, announced seconds from the answer to the next turn, prompt group or null, name of the grammar
     or null, and only with an adapter: [its name, the number of its loading, its blocks], or with a further model:
     its number]
    ["finish", t, id, reason]
    ["allow", t, tenant, blocks or null]
    ["cache", t, tenant, floor, ceiling or null]     of its idle cached blocks
    ["pin", t, tenant, blocks]       of its prompts: they stay cached on its account, and its other blocks no longer do
    ["extend", t, id, tokens]
    ["charge", t, tenant, seconds]       of a processor, for work of its requests beside the engine; a `true` behind
     them: of requests of the spare class
    ["debts", t, {tenant: service by other replicas since the last entry, in the unit of account}, replicas]
    ["policy", t, [weights, offsets, bounds, may_wait]]
    ["calibrate", t, decodes, context of each, prefills, computed tokens before each, tokens of each]
                the device is idle, and runs a step of this shape to measure its time
    ["calibrated", t, [[a shape as in `calibrate`, elapsed] ...]]    the times of that step, or of all before the first;
                with the number of a further model behind them
    ["plan", t, step or null, decodes, checksum, [[id, tokens of prefill] ...], [preempted ...],
     [wait reason, head] | [wait reason, head, 1 if the head takes a slot that sequences due before it may not] | null,
     {tenant: limit of its own at which it is held} or null for the same as before,
     [[sequence given up since the last plan, reason] ...]]
    ["done", t, step, elapsed, [id of each sequence that an end token ended ...], [that reached max_tokens ...],
     [for which no token could be drawn ...],
     and only if there are any: [[id, count of forced tokens, or of tokens behind accepted drafts, that came with the
     sampled one] ...]]
    ["lost", t, step, [preempted ...]]     the device had no memory: this step and those behind it did not take place

Blocks that may be shared are runs of ordinals (`blocks`). `finish`, `plan`, `done` and `lost` end with an object if
there is news of the prefix cache or of drafts:

    {"drafted": {id: tokens drafted behind its row; 0: its row waits until its newest token is known},
     "found": {id: blocks of its prompt, or of its recompute, that this plan hit}, "forked": {id: id of the leader that
     computes its prompt}, "evicted": blocks evicted since the last plan that tells it, "idle": idle blocks then,
     "blocks": {id: blocks of its output, named as it left them}}

Names of settings and refusals, and the version, are those of `names`; choices and reasons are their enums' values.

The log holds no prompt, no token and no hash of either. The checksum is over slots and starts of all rows, so that a
replay with another decision fails at the first step that differs.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from contextlib import contextmanager, suppress
from json.encoder import encode_basestring_ascii
from typing import Any

from admission.controller import Controller
from admission.core import CoreConfig, make_core, raise_failure
from admission.event_logs.blocks import CacheFindings, NewlyNamed, ReplayedNames, runs_of
from admission.event_logs.names import (
    REFUSALS,
    VERSION,
    asked_of,
    core_entry,
    engine_entry,
    policy_entry,
    read_core_config,
    read_engine_config,
    read_scheduling_policy,
)
from admission.event_logs.numbers import checksum, in_seconds, moment
from admission.observer import CoreObserver
from admission.outcome import AdmissionRefused
from admission.promise import Promise
from admission.request import JudgedPrompt, JudgedRequest
from admission.scheduling_policy import SchedulingPolicy
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.adapter import Adapter, make_adapter
from backend.calibration_steps import CalibrationStep, CalibrationTimes
from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.paged_kv.block_names import BlockName
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NO_TOKEN, StepOutput
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, PromptRequest, Sequence

Entry = list[Any]
Write = Callable[[str], object]
MakeModel = Callable[[StepTime, float], StepTimeModel]  # from coefficients and the number of steps they count as

END_TOKEN = 1  # ends a sequence in a replay; all other tokens are 0
_encode = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode


class EventLog(CoreObserver):
    """Writes a line for each event and decision of a core. `write` gets whole lines without their end."""

    def __init__(self, scheduler: Scheduler, write: Write) -> None:
        self._scheduler = scheduler
        self._write = write
        self._held: dict[str, WaitReason] = {}
        self._given_up: list[Sequence] = []  # since the last plan
        self._slots: list[int] = []  # of the last step
        self._slots_checksum = 0
        self._newly_named = NewlyNamed(scheduler.kv_manager.blocks)
        self._findings = CacheFindings(scheduler.kv_manager.blocks)

    def write_header(self, config: CoreConfig, engine: EngineConfig, models: Listed[StepTimeModel]) -> None:
        """Write the first line: the configuration and the models that the core was made with."""
        first, *others = [[list(one.fitted.coefficients), one.fitted.knee, one.prior_weight] for one in models]
        further = [others] if others else []
        self._write(_encode(["log", VERSION, engine_entry(engine), core_entry(config), *further, *first]))

    def serves(self, model: str, block_bytes: int, unix: float, now: float) -> None:
        """Write the gateway's identity, and the time of day in seconds since 1970."""
        self._log("gateway", now, unix, model, block_bytes)

    def requested(self, asked: JudgedRequest, now: float) -> None:
        prompts = [_prompt_of(one) for one in asked.prompts]
        who = f"{_text_of(asked.id)},{_text_of(asked.tenant)},{_text_of(asked.key)},{_text_of(asked.service_tier)}"
        times = f"{_number_of(asked.first_token)},{_number_of(asked.last_token)},{_number_of(asked.interval)}"
        said = f"{who},{asked.body_bytes},{times},[{','.join(prompts)}],{_text_of(asked.refusal)}"
        self._write(f'["request",{moment(now)},{said}]')

    def arrived(self, sequence: Sequence, answer: Promise | AdmissionRefused, now: float) -> None:
        request, prompt = sequence.request, sequence.num_prompt_tokens
        promise, why = (answer, None) if isinstance(answer, Promise) else (None, REFUSALS[type(answer)])
        tokens = f"{prompt},{request.max_tokens},{sequence.token_limit - prompt}"
        deadlines = request.first_token_by, request.done_by, request.first_token_target
        by = ",".join([_number_of(seconds) for seconds in deadlines])
        promised = f"{_number_of(promise.first_token)},{_number_of(promise.last_token)}" if promise else "null,null"
        self._write(
            f'["arrive",{moment(now)},{_text_of(sequence.id)},{_text_of(sequence.tenant)},{tokens},'
            f"{request.priority_class},{_number_of(request.token_interval)},{request.body_bytes},"
            f"{by},{promised},{_text_of(why)}{self._kept_of(sequence)}]"
        )

    def finished(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        ended = f"{_text_of(sequence.id)},{_text_of(reason.value)}"
        self._write(f'["finish",{moment(now)},{ended}{self._cached()}]')

    def gave_up(self, sequence: Sequence, now: float) -> None:
        self._given_up.append(sequence)
        self._newly_named.collect()

    def allowed(self, tenant: str, blocks: int | None, now: float) -> None:
        self._log("allow", now, tenant, blocks)

    def cache_limited(self, tenant: str, floor: int, ceiling: int | None, now: float) -> None:
        self._log("cache", now, tenant, floor, ceiling)

    def prefixes_pinned(self, tenant: str, names: Collection[BlockName], now: float) -> None:
        pinned = runs_of([name.ordinal for name in names])
        self._write(f'["pin",{moment(now)},{_text_of(tenant)},{pinned}]')

    def extended(self, sequence: Sequence, tokens: int, now: float) -> None:
        self._log("extend", now, sequence.id, tokens)

    def charged(self, tenant: str, seconds: float, now: float, is_spare: bool) -> None:
        if is_spare:
            self._log("charge", now, tenant, seconds, True)
        else:
            self._log("charge", now, tenant, seconds)

    def debts_changed(self, served: Mapping[str, float], replicas: int, now: float) -> None:
        self._log("debts", now, served, replicas)

    def policy_changed(self, policy: SchedulingPolicy, now: float) -> None:
        self._log("policy", now, policy_entry(policy))

    def calibrating(self, step: CalibrationStep, now: float) -> None:
        self._log("calibrate", now, *step)

    def calibrated(self, measured: CalibrationTimes, now: float, model: int) -> None:
        said = [f"[{','.join(map(str, step))},{moment(seconds)}]" for step, seconds in measured]
        self._write(f'["calibrated",{moment(now)},[{",".join(said)}]{f",{model}" if model else ""}]')

    def scheduled(self, step: ScheduledStep | None, now: float) -> None:
        """Write a plan. Lines of each step and of each request are formatted by hand: twice as fast as the encoder."""
        planned = "null,0,0,[]" if step is None else self._planned(step)
        preempted, blocked, held, ended = _ids_of(self._scheduler.preempted), "null", "null", "[]"
        if (reason := self._scheduler.wait_reason) and (head := self._scheduler.waiting_head):
            overtakes = [1] if head is self._scheduler.overtaker else []
            blocked = _encode([reason.value, head.id, *overtakes])
        if self._scheduler.held_tenants != self._held:
            held = self._changed_holds()
        if self._given_up:
            ended = self._take_given_up()
        found = self._findings.take_members(step)
        if self._scheduler.drafting is not None and (drafted := self._scheduler.drafting.drafted):
            found.append(f'"drafted":{_encode({sequence.id: count for sequence, count in drafted.items()})}')
        cached = self._cached(found)
        self._write(f'["plan",{moment(now)},{planned},{preempted},{blocked},{held},{ended}{cached}]')

    def updated(self, step: ScheduledStep, output: StepOutput, now: float) -> None:
        stopped = complete = "[]"
        if step.ended:
            stopped = _ids_of([sequence for sequence, reason in step.ended if reason is FinishReason.STOP])
            complete = _ids_of([sequence for sequence, reason in step.ended if reason is FinishReason.LENGTH])
        jumped = f",{_encode([[one.id, count] for one, count in step.jumped.items()])}" if step.jumped else ""
        ended = f"{stopped},{complete},{_ids_of(step.failed)}{jumped}{self._cached()}"
        self._write(f'["done",{moment(now)},{output.step},{moment(output.elapsed)},{ended}]')

    def rolled_back(self, step: ScheduledStep, now: float) -> None:
        preempted = _ids_of(self._scheduler.preempted)
        self._write(f'["lost",{moment(now)},{step.batch.step},{preempted}{self._cached()}]')

    def _planned(self, step: ScheduledStep) -> str:
        """Return the part of a plan's line that describes its step."""
        batch, decodes, chunks = step.batch, step.batch.num_decodes, ""
        if decodes < len(batch.slots):
            prefills = zip(step.sequences[decodes:], batch.lengths[decodes:], strict=True)
            chunks = ",".join([f"[{encode_basestring_ascii(sequence.id)},{length}]" for sequence, length in prefills])
        if batch.slots != self._slots:  # in most steps they equal the slots of the previous step
            self._slots, self._slots_checksum = batch.slots, checksum(batch.slots)
        return f"{batch.step},{decodes},{checksum(batch.starts, self._slots_checksum)},[{chunks}]"

    def _kept_of(self, sequence: Sequence) -> str:
        """Return the end of an arrival's line: the prompt's block names, for sharing, the expected time of the next
        turn, the prompt group, and the grammar.
        """
        blocks, adapter = runs_of([name.ordinal for name in sequence.block_names]), sequence.request.adapter
        again, group = _number_of(sequence.request.expects_followup), _text_of(sequence.prompt_group)
        adapted = "" if adapter is None else f",{_encode([adapter.name, adapter.number, adapter.num_blocks])}"
        adapted += f",{model}" if (model := sequence.request.model) else ""
        return f",{blocks},{again},{group},{_text_of(sequence.request.grammar)}{adapted}"

    def _cached(self, said: Iterable[str] = ()) -> str:
        """Return the end of a line: the news of the prefix cache, mostly none."""
        told = [*said, *self._newly_named.take_members()]
        return f",{{{','.join(told)}}}" if told else ""

    def _changed_holds(self) -> str:
        self._held = dict(self._scheduler.held_tenants)
        return _encode({tenant: limit.value for tenant, limit in self._held.items()})

    def _take_given_up(self) -> str:
        given_up, self._given_up = self._given_up, []
        return _encode([[one.id, one.finish_reason.value] for one in given_up if one.finish_reason])

    def _log(self, kind: str, now: float, *said: Any) -> None:
        self._write(f'["{kind}",{moment(now)},{_encode(said)[1:]}')


# parts of lines are put together by hand: the encoder takes twice as long


def _text_of(text: str | None) -> str:
    return "null" if text is None else encode_basestring_ascii(text)


def _prompt_of(prompt: JudgedPrompt) -> str:
    declared, repeated = "true" if prompt.is_declared else "false", ",true" if prompt.is_repeated else ""
    return f"[{prompt.prompt_tokens},{prompt.most},{declared}{repeated}]"


def _number_of(number: float | None) -> str:
    return "null" if number is None else repr(number)


def _ids_of(sequences: list[Sequence]) -> str:
    return f"[{','.join([encode_basestring_ascii(sequence.id) for sequence in sequences])}]" if sequences else "[]"


def make_logged_core(
    config: CoreConfig,
    engine: EngineConfig,
    model: StepTimeModel,
    write: Write,
    observer_failed: Callable[[Exception], object] = raise_failure,
    others: Listed[StepTimeModel] = (),
) -> tuple[Controller, EventLog]:
    """Make a core whose first observer is its log; the log's first line is written."""
    core = make_core(config, engine, model, observer_failed, others)
    event_log = EventLog(core.scheduler, write)
    core.observers.insert(0, event_log)
    event_log.write_header(config, engine, [model, *others])
    return core, event_log


class LogError(Exception):
    """The line, counted from 1, is no entry of an event log, or the log is incomplete."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line, self.reason = line, reason


class ReplayMismatch(LogError):
    """A replay decided differently from the log; the message has the line and both decisions."""


@contextmanager
def reading(line: int) -> Iterator[None]:
    """Turn any error about a malformed or misplaced entry into a `LogError`."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ConfigError, AssertionError, RecursionError) as error:
        reason = f"not an entry of an event log that is whole ({type(error).__name__}: {error})"
        raise LogError(line, reason) from error


def replay(
    lines: Iterable[str], sequences: dict[str, Sequence] | None = None, make_model: MakeModel = StepTimeModel
) -> Iterator[Entry]:
    """Feed a log's events to a fresh core; yields each entry once the core has decided it again.

    All sequences are put into `sequences` by their ids; the model of `make_model` is told each step's work and time.
    Raises `ReplayMismatch` at the first line that is not reproduced to the byte, `LogError` at a malformed line.
    """
    written: list[str] = []
    replayed: _Replay | None = None
    for number, line in enumerate(lines, 1):
        written.clear()
        with reading(number):
            entry = json.loads(line)
            if replayed is None:
                replayed = _Replay(entry, written.append, make_model, {} if sequences is None else sequences)
            else:
                replayed.apply(entry)
        if written != [line.rstrip("\n")]:
            raise ReplayMismatch(number, f"recorded {line.rstrip()}, decided {' '.join(written)}")
        yield entry


def check_version(entry: Entry) -> None:
    """Check a log's first line. Raises `LogError` if it is malformed, or of another version."""
    if entry[0] != "log":
        raise LogError(1, "the log begins in the middle: its first segment is gone, or it is another file")
    if entry[1] != VERSION:
        reason = f"a log of version {entry[1]}; this is version {VERSION}, and reads no other"
        raise LogError(1, f"{reason}: use the release that recorded it")


def make_configs(header: Entry) -> tuple[CoreConfig, EngineConfig]:
    """Reads the settings in a log's first line."""
    _, _, engine, config, *_ = header
    return read_core_config(config), read_engine_config(engine)


def step_times_of(header: Entry) -> list[list[Any]]:
    """Return the coefficients, the knee and the prior steps of each model in a log's first line."""
    _, _, _, _, *further, coefficients, knee, prior_weight = header
    return [[coefficients, knee, prior_weight], *(further[0] if further else ())]


class _Replay:
    """A core that replays a log's events."""

    def __init__(self, header: Entry, write: Write, make_model: MakeModel, sequences: dict[str, Sequence]) -> None:
        check_version(header)
        core, engine = make_configs(header)
        model, *others = [
            make_model(StepTime(tuple(each), knee, engine.expert_reads_of(number)), weight)
            for number, (each, knee, weight) in enumerate(step_times_of(header))
        ]
        self._core, self._log = make_logged_core(core, engine, model, write, others=others)
        self._sequences = sequences
        self._names = ReplayedNames()
        self._adapters: dict[int, Adapter] = {}  # by the number of its loading
        self._core.scheduler.name_blocks_by(self._names)

    def apply(self, entry: Entry) -> None:
        core, kind, now = self._core, entry[0], in_seconds(entry[1])
        news: Mapping[str, Any] = {}
        if isinstance(entry[-1], dict):
            *entry, news = entry
        self._tell(news)
        if kind == "arrive":
            with suppress(AdmissionRefused):
                core.arrive(self._sequence_of(entry), now)
        elif kind == "request":
            core.requested(asked_of(entry), now)
        elif kind == "finish":
            core.finish_sequence(self._sequences[entry[2]], FinishReason(entry[3]), now)
        elif kind == "extend":
            core.raise_token_limit(self._sequences[entry[2]], entry[3], now)
        elif kind in {"charge", "debts"}:
            (core.charge_side_work if kind == "charge" else core.debts_changed)(entry[2], entry[3], now, *entry[4:])
        elif kind == "plan":
            core.schedule(now)
            core.take_ended()
        elif kind == "done":
            _, _, step, elapsed, ended, _, failed, *jumped = entry
            sampled = [sequence.id for sequence in core.in_flight[0].sampled]
            core.update_from_output(_output_of(sampled, step, in_seconds(elapsed), ended, failed, *jumped), now)
        elif kind == "lost":
            core.rollback(now)
        else:
            self._apply_setting(kind, now, entry[2:])

    def _tell(self, news: Mapping[str, Any]) -> None:
        """Tell what depends on tokens: names of blocks, and drafts."""
        self._names.tell(news.get("blocks", {}))
        if (drafting := self._core.scheduler.drafting) is not None:
            drafting.told = news.get("drafted", {})

    def _apply_setting(self, kind: str, now: float, said: list[Any]) -> None:
        """Apply an entry that changes a setting: a lease, a policy, or the gateway."""
        if kind == "allow":
            tenant, blocks = said
            self._core.allow(tenant, blocks, now)
        elif kind == "cache":
            tenant, floor, ceiling = said
            self._core.limit_cache(tenant, floor, ceiling, now)
        elif kind == "pin":
            tenant, runs = said
            self._core.pin_prefixes(tenant, self._names.of(runs), now)
        elif kind == "calibrate":
            self._core.calibrate(now)
        elif kind == "calibrated":
            measured = [(CalibrationStep(*shape), in_seconds(elapsed)) for *shape, elapsed in said[0]]
            self._core.calibrated(measured, now, *said[1:])
        elif kind == "policy":
            self._core.set_policy(read_scheduling_policy(said[0]), now)
        elif kind == "gateway":
            unix, model, block_bytes = said
            if not (isinstance(unix, int | float) and isinstance(model, str) and isinstance(block_bytes, int)):
                raise ValueError("a gateway has a time, a model and a block's bytes")
            self._log.serves(model, block_bytes, unix, now)
        else:
            raise ValueError(f"an entry of unknown kind {kind!r}")

    def _adapter_of(self, name: str, number: int, num_blocks: int) -> Adapter:
        if number not in self._adapters:
            self._adapters[number] = make_adapter(name, "", number, num_blocks)
        return self._adapters[number]

    def _sequence_of(self, entry: Entry) -> Sequence:
        _, _, name, tenant, prompt, most, allowed, level, interval, size, by, done_by, target, *rest = entry
        served = rest.pop() if isinstance(rest[-1], int) else 0
        adapter = self._adapter_of(*rest.pop()) if isinstance(rest[-1], list) else None
        *_, blocks, again, group, grammar = rest
        tokens, sampling, ends = [0] * prompt, SamplingParams(), frozenset([END_TOKEN])
        request = PromptRequest(
            name,
            tenant,
            tokens,
            sampling,
            most,
            0,
            ends,
            level,
            interval,
            by,
            done_by,
            target,
            size,
            again,
            grammar,
            adapter,
            served,
        )
        sequence = Sequence(request, prompt_group=group, block_names=self._names.of(blocks))
        sequence.limit_to(allowed)
        self._sequences[name] = sequence
        return sequence


def _output_of(
    sampled: list[str], step: int, elapsed: float, ended: list[str], failed: list[str], jumped: Iterable[list[Any]] = ()
) -> StepOutput:
    """Return the output of a step that sampled for these ids, with tokens that have its effects alone: `ended` got an
    end token, `failed` no token, and `jumped` gives the number of tokens that a grammar forced.
    """
    forced = {name: [0] * (count - 1) + [END_TOKEN if name in ended else 0] for name, count in jumped}
    drawn = dict.fromkeys(ended, END_TOKEN) | dict.fromkeys(failed, NO_TOKEN) | dict.fromkeys(forced, 0)
    by_row = {row: forced[name] for row, name in enumerate(sampled) if name in forced}
    return StepOutput(step, [drawn.get(name, 0) for name in sampled], elapsed, forced=by_row or None)
